"""services: a room of `router`."""
