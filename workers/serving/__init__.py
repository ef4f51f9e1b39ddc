"""serving: a room of `workers`."""
