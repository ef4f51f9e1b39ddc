"""Workers as the gateway knows them: their record and health, leases, pools, the fleet, the watch loops.

Owns every member and every lease. Imports `estimator`, `fleet_file`, `grid`, `inflight`, `kv_events`,
`prefix`, workers and proto. Promises: leases never go negative and end exactly once (I2); none is taken on
a worker that may not take work (I3); a configuration is applied in one step.
"""
