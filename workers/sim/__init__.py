"""sim: a room of `workers`."""
