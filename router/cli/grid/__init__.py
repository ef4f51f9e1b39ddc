"""grid: a room of `router`."""
