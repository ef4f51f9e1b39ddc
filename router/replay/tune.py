"""A search for the parameters of a policy: every combination of the values that it says are worth a try.

It runs on other rows of the trace than those whose figures are shown, so that these say what the parameters
are worth, and not how well they were fitted.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from slagate.pools.grid.json_text import laid_out, read_json
from slagate.router.replay.policies.registry import Value, parameters_of
from slagate.workers.runtime.usage import UsageError

Parameters = Mapping[str, Value]


class Tried(NamedTuple):
    """One combination, and what came of it."""

    parameters: Parameters
    attainment: float  # the mean share of requests that met both targets
    n_changed: int  # parameters that are not at their defaults


def combinations(policy: str) -> list[Parameters]:
    """All combinations of the values to try. Raises `UsageError` where a policy has no parameters."""
    known = parameters_of(policy)
    if not known:
        raise UsageError(f"--tune: {policy} has no parameters")
    return [
        dict(zip(known, values, strict=True))
        for values in product(*(each.tried for each in known.values()))
    ]


def other_rows(skip: int, n_rows: int, n_in_trace: int) -> tuple[int, int]:
    """Rows to search on, as (skip, n_rows): those behind the rows shown, else those before them.

    Where fewer are left on both sides, it is all of the longer one. Raises `UsageError` where none are.

    >>> other_rows(400, 400, 12_000)
    (800, 400)
    >>> other_rows(11_700, 300, 12_000)
    (11400, 300)
    """
    end = skip + n_rows
    behind, before = max(n_in_trace - end, 0), min(skip, n_in_trace)
    n_found = min(n_rows, max(behind, before))
    if n_found == 0:
        raise UsageError(f"--tune: the trace has {n_in_trace} rows, and none but those shown")
    return (end, n_found) if behind >= n_found else (before - n_found, n_found)


def tried(policy: str, parameters: Parameters, attainment: float) -> Tried:
    """A combination with what it attained."""
    known = parameters_of(policy)
    n_changed = sum(value != known[name].default for name, value in parameters.items())
    return Tried(parameters, attainment, n_changed)


def best_first(points: list[Tried]) -> list[Tried]:
    """By attainment; of equals the one nearest to the defaults comes first."""
    return sorted(points, key=lambda point: (-point.attainment, point.n_changed))


def points_table(policy: str, points: list[Tried]) -> Table:
    """All points, the best first."""
    table = Table(
        title=policy,
        title_justify="left",
        caption="* the defaults",
        caption_justify="left",
    )
    for name in points[0].parameters:
        table.add_column(name, justify="right")
    table.add_column("met both", justify="right")
    for point in best_first(points):
        mark = " " if point.n_changed else "*"
        table.add_row(*map(_shown, point.parameters.values()), f"{point.attainment:.1%}{mark}")
    return table


def write_parameters(path: Path, policy: str, parameters: Parameters) -> None:
    """Set a policy's parameters in the suite file at `path`; what else is in it stays.

    Raises `UsageError` for a file that cannot be read or written.
    """
    try:
        content = read_json(path.read_text(encoding="utf-8")).value
        if not isinstance(content, dict) or not isinstance(content.get("parameters", {}), dict):
            raise UsageError(f"--tune: {path}: is no suite file")
        of_all = content.setdefault("parameters", {})
        of_all[policy] = dict(parameters)
        path.write_text(laid_out(content), encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--tune: {path}: {reason}") from error


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:g}"
