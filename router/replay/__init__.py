"""What `slagate replay` does: the gateway's own graph over simulated workers in virtual time, on any trace.

Owns runs, their rows and the schedule that bounds them. Imports `app`, `generate`, `grid_view`,
`loadgen`, `replay/policies`, `request`, pools, workers, proto and configs.
Promises: the same run gives the same row, but for the times it took; the invariants of ARCHITECTURE.md are
checked while it runs; a router is never told what a fleet would not tell it.
"""
