"""The KV transport over NIXL: one worker reads the host memory of another.

Owns the agent with its thread, registered memory and its slots, peers, and pulls that wait for room.
Imports `kv_transfer`. Promises: every call of an agent is made on its thread; a pull that timed out keeps
its slots until NIXL says that it has ended; NIXL is loaded only when it is asked for.
"""
