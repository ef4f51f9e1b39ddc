"""request: a room of `router`."""
