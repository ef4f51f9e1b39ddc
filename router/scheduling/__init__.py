"""scheduling: a room of `router`."""
