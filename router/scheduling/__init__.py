"""Chooses a pool and a worker for each request, and has requests wait for one.

Owns the queue, and the step from a decision to leases. Imports `request`, pools and workers.
Promises: the choice is pure (I4); choice and leases are one step without await; what an older request
waits for no younger one takes.
"""
