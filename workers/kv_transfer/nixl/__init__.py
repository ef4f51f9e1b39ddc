"""nixl: a room of `workers`."""
