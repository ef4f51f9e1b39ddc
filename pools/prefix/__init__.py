"""prefix: a room of `pools`."""
