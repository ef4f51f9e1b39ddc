"""grid_build: a room of `pools`."""
