"""tools: a room of `router`."""
