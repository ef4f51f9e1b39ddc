"""trtllm: a room of `workers`."""
