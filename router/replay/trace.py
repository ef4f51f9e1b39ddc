"""The rows of a trace, in Mooncake's JSON lines.

A row's prompt is made of its block ids as `router/loadgen` makes it; one without ids shares nothing.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slagate.router.loadgen.trace import BLOCK_TOKENS, load_trace, splitmix64

_OWN = 1 << 63
"""Added to the number of a row without block ids, to seed its prompt: block ids are small numbers."""


class TraceRow(NamedTuple):
    """One request of a trace."""

    number: int  # its place in the file, from 0
    time_s: float  # from any fixed point of time
    isl_tokens: int
    osl_tokens: int  # of the true answer
    hash_ids: tuple[int, ...] = ()  # one for each 512 prompt tokens; empty: not known

    @property
    def conversation(self) -> int:
        """The second block id, as the first is often of a system prompt; without one, the row's number."""
        return self.hash_ids[1] if len(self.hash_ids) > 1 else self.number

    def prompt(self, vocab_size: int) -> npt.NDArray[np.uint32]:
        """The prompt's tokens, u32[isl_tokens], each below `vocab_size`."""
        if self.hash_ids:
            words = splitmix64(self.hash_ids, BLOCK_TOKENS).reshape(-1)[: self.isl_tokens]
        else:
            words = splitmix64([_OWN + self.number], self.isl_tokens).reshape(-1)
        tokens: npt.NDArray[np.uint32] = (words % np.uint64(vocab_size)).astype(np.uint32)
        return tokens


def read_rows(path: str | Path, *, skip: int, n_rows: int) -> list[TraceRow]:
    """Rows `skip` to `skip + n_rows` of the trace at `path`. Raises `TraceError`."""
    rows = (
        TraceRow(
            number,
            request.timestamp_ms / 1000,
            request.isl_tokens,
            request.osl_tokens,
            request.hash_ids,
        )
        for number, request in enumerate(load_trace(path))
    )
    return list(islice(rows, skip, skip + n_rows))


def arrival_s(rows: Sequence[TraceRow], load: float) -> list[float]:
    """When each row arrives, from the first one on; at load 1 as fast as in the trace."""
    return [(row.time_s - rows[0].time_s) / load for row in rows]
