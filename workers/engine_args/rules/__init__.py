"""rules: a room of `workers`."""
