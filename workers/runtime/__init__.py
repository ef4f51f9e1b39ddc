"""What any process of slagate needs: logs, listening, signals, ready line, probes, clock, hints.

Owns nothing that lasts. Imports proto, for addresses. Promises: stdout has the ready line and output only,
logs go to stderr; long work takes a bounded step in each turn of the event loop.
"""
