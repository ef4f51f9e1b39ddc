"""Load: traces as requests, open and closed loop, every stream checked.

Owns no state beyond a run. Imports `request`, workers, proto and configs.
Promises: arrivals follow the trace whatever the fleet does; the same seed asks the same.
"""
