"""runtime: a room of `workers`."""
