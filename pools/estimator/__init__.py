"""estimator: a room of `pools`."""
