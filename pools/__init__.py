"""Pools: the state of the fleet, and the files that describe it.

Owns workers, leases, the prefix index, the grids and what predicts speed. May import `slagate.workers` and
what that may import. The only network I/O here is that of `fleet/watch.py` and `kv_events`.
"""
