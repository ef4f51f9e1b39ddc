"""The double's KV cache: the content of a block, the paged pool, stored blocks by prefix, events.

Owns blocks and their states. Imports nothing of ours.
Promises: a block's bytes and the token after it are functions of all tokens up to its end.
"""
