"""Another configuration for a running gateway, or the one before.

Owns the configuration in force, and those that can be gone back to. Imports `metrics`, `receipts`,
`scheduling`, pools and workers.
Promises: checked off the event loop, put in force in one step; with a problem nothing changes.
"""
