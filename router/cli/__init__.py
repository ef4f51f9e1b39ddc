"""cli: a room of `router`."""
