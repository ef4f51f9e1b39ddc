"""`slagate grid select`: the cell of each request of a JSON Lines stream."""

import difflib
import json
from collections.abc import Iterable, Iterator

from slagate.pools.errors import SelectError
from slagate.pools.grid import AXIS_FIELDS, StageGrid
from slagate.pools.json_text import is_finite_number, read_json, shown

_FIELDS = (*AXIS_FIELDS, "priority")


def select_lines(grid: StageGrid, lines: Iterable[str]) -> Iterator[str]:
    """One JSON object without a line end for each of `lines`, in order.

    `lines` are those of a text file as iterating over it gives them, so the newline that ends the file
    starts no line, and an empty line elsewhere is one. A request without a cell gives
    `{"error": "..."}`; no content of a line raises.
    """
    for line in lines:
        yield json.dumps(_answer(grid, line))


def _answer(grid: StageGrid, line: str) -> dict[str, object]:
    request, problems = read_json(line)
    if problems:
        return {"error": "; ".join(map(str, problems))}
    if not isinstance(request, dict):
        return {"error": f"a line must be an object (got {shown(request)})"}
    faults = [fault for key, value in request.items() if (fault := _fault(key, value))]
    if faults:
        return {"error": "; ".join(faults)}
    priority = request.pop("priority", None)
    try:
        cell = grid.select(request, priority)
    except SelectError as error:
        return {"error": str(error)}
    layer = {"layer": cell.index[0]} if len(cell.index) == 3 else {}
    return {
        **layer,
        "row": cell.row,
        "col": cell.col,
        "base_pool": cell.base_pool,
        "pool": cell.pool,
        "pool_name": grid.pool_names[cell.pool],
    }


def _fault(key: str, value: object) -> str | None:
    """Why `value` cannot stand at `key`, also where this stage has no use for it."""
    if key not in _FIELDS:
        close = difflib.get_close_matches(key, _FIELDS, n=1)
        hint = f', did you mean "{close[0]}"?' if close else ""
        return f"{key}: unknown key{hint} (got {shown(value)})"
    if value is not None and not is_finite_number(value):
        return f"{key}: must be a finite number (got {shown(value)})"
    return None
