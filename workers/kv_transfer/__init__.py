"""kv_transfer: a room of `workers`."""
