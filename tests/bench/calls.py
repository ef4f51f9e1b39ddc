"""Python calls and changes of module of one disaggregated request: counts, which no noise touches."""

from pathlib import Path
from typing import Any

from slagate.workers.runtime.virtual_loop import run
from support.gateway.call_counts import count_calls


def measure(folder: Path) -> dict[str, Any]:
    """From the socket to the first token, for each further one, from the last one to the end."""
    del folder
    counts = run(count_calls)
    return {name: part._asdict() for name, part in counts._asdict().items()} | {"missed": []}
