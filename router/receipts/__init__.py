"""What a request leaves behind: its record, receipts kept and followed, attainment, and recomputing.

Owns records of requests that ended. Imports `request`, `scheduling`, pools, workers
and proto.
Promises: no prompt text, no token ids; readers hold nothing up; a receipt is enough to decide again.
"""
