"""rpc: a room of `proto`."""
