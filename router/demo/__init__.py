"""demo: a room of `router`."""
