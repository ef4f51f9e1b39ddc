"""profiles: a room of `workers`."""
