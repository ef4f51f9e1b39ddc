"""reload: a room of `router`."""
