"""Logits processors: which ones a worker offers, those of one request, and how the engine calls them.

Owns the entry-point group `slagate.logits_processors`. Imports `errors` and `runtime`.
Promises: a factory is called once a request; an exception of a processor does not reach the engine.
"""
