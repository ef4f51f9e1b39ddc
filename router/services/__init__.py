"""The services besides Generate: OpenEngine `Control` for clients, `slagate.v1.Gateway` for operators.

Owns no state: it reads the fleet, the receipts and the reloader. Imports `receipts`, `reload`, `request`,
`scheduling`, pools, workers and proto. Promises: clients see one engine, and nothing of each other.
"""
