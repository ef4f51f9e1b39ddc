"""Load: traces as requests, open and closed loop, every stream checked; gateways and workers as children.

Owns the child processes of a run. Imports `process`, `request`, workers, proto and configs.
Promises: arrivals follow the trace whatever the fleet does; the same seed asks the same.
"""
