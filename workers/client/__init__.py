"""client: a room of `workers`."""
