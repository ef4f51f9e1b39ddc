"""KV cache events in the dict shape of TensorRT-LLM's polling API, written by hand."""

from itertools import count
from typing import Any

BLOCK_TOKENS = 4


def tokens_of(n_tokens: int, first: int = 1) -> list[dict[str, Any]]:
    return [
        {"type": "unique_token", "token_id": first + i, "token_extra_id": 0}
        for i in range(n_tokens)
    ]


def block(
    hash_: object, n_tokens: int = BLOCK_TOKENS, *, first: int = 1, level: object = 0, **more: Any
) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": hash_,
        "tokens": tokens_of(n_tokens, first),
        "cache_level": level,
        "priority": 35,
        **more,
    }


def stored(*blocks: object, parent: object = None, **more: Any) -> dict[str, Any]:
    """Blocks may be given by their hash alone."""
    listed = [one if isinstance(one, dict) else block(one) for one in blocks]
    return {"type": "stored", "parent_hash": parent, "blocks": listed, **more}


def removed(*hashes: object) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def moved(hash_: object, old: object, new: object) -> dict[str, Any]:
    diff = {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": hash_, "cache_level": diff, "priority": None}


def created() -> dict[str, Any]:
    return {"type": "created", "num_blocks_per_cache_level": [10, 0]}


class EngineEvents:
    """Numbers events per rank, as an engine does."""

    def __init__(self) -> None:
        self._ids: dict[int | None, count[int]] = {}

    def skip(self, n_events: int, rank: int | None = None) -> None:
        """Lose events."""
        for _ in range(n_events):
            next(self._ids.setdefault(rank, count()))

    def __call__(
        self, data: object, *, window: object = 1000, rank: int | None = None
    ) -> dict[str, Any]:
        event = {"event_id": next(self._ids.setdefault(rank, count())), "data": data}
        if window is not None:
            event["window_size"] = window
        if rank is not None:
            event["attention_dp_rank"] = rank
        return event
