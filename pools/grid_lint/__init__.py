"""grid_lint: a room of `pools`."""
