"""Pools: the pool grid, the members of each pool with their leases, and what predicts their speed.

Owns the state of the fleet. May import `slagate.workers` and what that may import.
"""
