"""The KV transport over NIXL: one worker reads the host memory of another.

Owns the agent with its thread, the registered memory and its slots, peers, and pulls that wait for room.
Imports `kv_transfer`. Promises: every call of an agent is made on its thread; a pull that timed out keeps
its slots until NIXL reports its end; NIXL is imported only when it is needed.
"""
