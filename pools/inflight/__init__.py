"""inflight: a room of `pools`."""
