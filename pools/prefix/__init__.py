"""Which worker has how much of a prompt cached.

Owns the index of events, which is exact and late, and apart from it what is expected because it was just
sent there, which is early and expires. Imports `inflight`.
Promises: matches compare tokens, not hashes; no method waits; both are bounded in memory.
"""
