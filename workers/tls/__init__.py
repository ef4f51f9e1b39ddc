"""tls: a room of `workers`."""
