"""Logits processors: those that a worker offers, those of a request, and how the engine calls them.

Owns the entry-point group `slagate.logits_processors`. Imports `errors` and `runtime`.
Promises: a factory is called once for each request; an exception of a processor does not reach the engine.
"""
