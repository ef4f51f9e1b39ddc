"""bench: a room of `router`."""
