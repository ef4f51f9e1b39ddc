"""client: a room of `router`."""
