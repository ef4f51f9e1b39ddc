"""How KV blocks move between workers of ours: the port, and shared memory.

Owns offered sessions until they are pulled, released, or closed. Imports `runtime`.
Promises: a session is pulled at most once; `done` is called exactly once, in time; bytes that arrive other
than they were exported are thrown away.
"""
