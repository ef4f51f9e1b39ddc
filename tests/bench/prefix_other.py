"""`RadixTree` of ai-dynamo-runtime behind the same three calls as the prefix index.

Its events are JSON with hashes of each block's tokens, both made before the clock runs: a publisher does
that elsewhere. It takes a query as a list of token ids.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.prefix_trace import BLOCK_TOKENS, Op, Query, Removed, Stored


def available() -> bool:
    """Whether the package is installed."""
    try:
        from dynamo._core import RadixTree  # noqa: F401
    except ImportError:
        return False
    return True


class OtherIndex:
    """Prepared operations are argument-less calls."""

    def __init__(self) -> None:
        from dynamo._core import RadixTree, compute_block_hash_for_seq

        self.tree: Any = RadixTree()
        self._hashes: Any = compute_block_hash_for_seq
        self._n_events = 0

    def prepared(self, op: Op) -> Callable[[], Any]:
        if isinstance(op, Query):
            return self._query(np.frombuffer(op.tokens, np.uint32).tolist())
        return self._event(op)

    def _query(self, ids: list[int]) -> Callable[[], Any]:
        tree, hashes = self.tree, self._hashes
        return lambda: tree.find_matches(hashes(ids, BLOCK_TOKENS)).scores

    def _event(self, op: Stored | Removed) -> Callable[[], Any]:
        data: dict[str, Any]
        if isinstance(op, Stored):
            ids = np.frombuffer(op.tokens, np.uint32).tolist()
            blocks = [
                {"block_hash": name, "tokens_hash": local}
                for name, local in zip(op.hashes, self._hashes(ids, BLOCK_TOKENS), strict=True)
            ]
            data = {"stored": {"parent_hash": op.parent, "blocks": blocks}}
        else:
            data = {"removed": {"block_hashes": op.hashes}}
        self._n_events += 1
        event = json.dumps({"event_id": self._n_events, "data": data, "dp_rank": 0}).encode()
        apply, worker = self.tree.apply_event, op.worker
        return lambda: apply(worker, event)
