"""grid_view: a room of `router`."""
