"""engine_args: a room of `workers`."""
