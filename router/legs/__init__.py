"""legs: a room of `router`."""
