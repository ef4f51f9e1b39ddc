"""How KV blocks move between simulated workers: the port, and its implementation with shared memory.

Owns offered sessions until they are pulled or released, or the transport is closed. Imports `runtime`.
Promises: a session is pulled at most once; `done` is called exactly once, in time; bytes that do not arrive
as they were exported are discarded.
"""
