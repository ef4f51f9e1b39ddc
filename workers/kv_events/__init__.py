"""kv_events: a room of `workers`."""
