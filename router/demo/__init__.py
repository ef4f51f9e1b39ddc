"""`slagate demo`: a fleet of simulated workers and a gateway on this machine, under a real trace.

Owns the processes that it starts, and the report. Imports `children`, `loadgen`, `output`, `receipts`,
`request`, `tables`, pools, workers and configs.
Promises: every stream is compared with what the model would have said; no process is left behind.
"""
