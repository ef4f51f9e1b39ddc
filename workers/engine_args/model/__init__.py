"""model: a room of `workers`."""
