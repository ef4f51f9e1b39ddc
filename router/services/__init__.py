"""What clients and operators ask besides Generate: OpenEngine `Control`, and `slagate.v1.Gateway`.

Owns no state: it reads the fleet, the receipts and the reloader. Imports `receipts`, `reload`, `request`,
`scheduling`, pools, workers and proto. Promises: clients see one engine, and nothing of each other.
"""
