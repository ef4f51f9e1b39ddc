"""The double's KV cache: what a block contains, the paged pool, stored blocks by prefix, events, polls.

Owns blocks and their states. Imports nothing of ours.
Promises: a block's bytes and the token after it are functions of all tokens up to its end.
"""
