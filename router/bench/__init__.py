"""`slagate bench`: levels of concurrency, measured at any OpenEngine server.

Owns the plan of a run, its figures, table, CSV and picture. Imports `client`, `grid_view`, `loadgen`,
`request` and workers. Promises: times are the client's own; every stream is checked as it comes.
"""
