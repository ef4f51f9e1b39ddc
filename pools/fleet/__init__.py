"""fleet: a room of `pools`."""
