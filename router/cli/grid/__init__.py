"""`slagate grid ...`: show, lint, build, select, schema.

Owns their options and output. Imports `cli`, `client`, `grid_view`, `loadgen`, `receipts`, `tables`, pools
and workers. Promises: everything works offline, but for traffic that `show` asks a gateway for.
"""
