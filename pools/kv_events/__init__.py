"""kv_events: a room of `pools`."""
