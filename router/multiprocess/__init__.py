"""multiprocess: a room of `router`."""
