"""What every process of slagate needs: logs, listening, signals, ready line, probes, clock, usage errors.

Owns no lasting state. Imports proto, for addresses. Promises: stdout has only the ready line and output,
and logs go to stderr; long work takes a bounded step in each turn of the event loop.
"""
