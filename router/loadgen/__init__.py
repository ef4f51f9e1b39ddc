"""loadgen: a room of `router`."""
