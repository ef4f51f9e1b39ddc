"""grid: a room of `pools`."""
