"""front: a room of `router`."""
