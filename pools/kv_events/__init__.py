"""A worker's KV events, followed: one stream for each rank, applied to the prefix index.

Owns subscriptions, and what is known of them. Imports `prefix`, workers and proto.
Promises: after batch N a rank has in the index what it had cached then, after a loss less and never more
(I6); the work is done in bounded steps.
"""
