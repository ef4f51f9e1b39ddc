"""Puts another configuration in force in a running gateway, or the one before it.

Owns the configuration in force, and those that can be gone back to. Imports `metrics`, `receipts`,
`scheduling`, pools and workers.
Promises: a configuration is checked off the event loop and put in force in one step; with a problem nothing
changes.
"""
