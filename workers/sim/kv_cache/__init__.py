"""kv_cache: a room of `workers`."""
