"""logits: a room of `workers`."""
