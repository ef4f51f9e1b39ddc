"""One request before any worker hears of it: parsed, checked, its SLA; and how it can end.

Owns the table of errors and outcomes, the limits of the gateway, requests that run. Imports pools, workers
and proto. Promises: what is wrong is refused with the field's name; each request ends in one outcome (I1).
"""
