"""A consumer of TensorRT-LLM's KV cache events that knows nothing of the cache but them."""

from typing import Any


class KvConsumer:
    """Blocks of one rank and window by hash, with their tier; fails on events that do not add up."""

    def __init__(self) -> None:
        self.levels: dict[int, int] = {}
        self._ever: set[int] = set()

    def take(self, data: dict[str, Any]) -> None:
        """Apply the `data` of one event."""
        if data["type"] == "stored":
            parent = data["parent_hash"]
            assert parent is None or parent in self._ever, "a child before its parent"
            for block in data["blocks"]:
                assert block["block_hash"] not in self.levels, "announced twice"
                self.levels[block["block_hash"]] = block["cache_level"]
                self._ever.add(block["block_hash"])
        elif data["type"] == "removed":
            assert data["block_hashes"]
            for block_hash in data["block_hashes"]:
                del self.levels[block_hash]
        elif data["type"] == "updated":
            moved = data["cache_level"]
            assert self.levels[data["block_hash"]] == moved["old_value"]
            self.levels[data["block_hash"]] = moved["new_value"]
        else:
            assert data["type"] == "created"
