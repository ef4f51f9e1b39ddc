"""receipts: a room of `router`."""
