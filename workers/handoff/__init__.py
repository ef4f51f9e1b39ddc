"""handoff: a room of `workers`."""
