"""Records of requests: receipts that are kept and followed, attainment, and decisions made again.

Owns the records of requests that have ended. Imports `request`, `scheduling`, pools, workers and proto.
Promises: no prompt text, no token ids; readers hold nothing up; a receipt is enough to decide again.
"""
