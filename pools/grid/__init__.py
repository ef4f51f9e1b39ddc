"""The pool grid: stages, axes, cells, priority overrides, and the order of pools.

Owns the arithmetic of Dynamo's global router, bit for bit. Imports nothing of ours.
Promises: pure; a grid is checked once, by `fleet_file`, and not here.
"""
