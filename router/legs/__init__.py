"""Calls to workers for one request: attempts, the prefill sink, the handoff, the relay to the client.

Owns what a request holds: its leases and its handoff. Imports `metrics`, `receipts`, `request`,
`scheduling`, pools, workers and proto. Promises: a handoff is used or released, once (I5); nothing is tried
again after a token (I7); clean-up never waits.
"""
