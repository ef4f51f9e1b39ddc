"""profiles: a room of `router`."""
