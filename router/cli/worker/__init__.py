"""worker: a room of `router`."""
