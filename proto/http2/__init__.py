"""http2: a room of `proto`."""
