"""Which worker has how much of a prompt cached.

Owns the index of KV events, which is exact and late, and the predictions from prompts that were just sent,
which are early and expire. Imports `inflight`.
Promises: matches compare tokens, not hashes; no method waits; both are bounded in memory.
"""
