"""The gateway's end of a worker: `WorkerClient`, the `Worker` port over gRPC.

Owns the connections to one worker: those for streams and the channel for control calls. Imports `errors`,
`tls`, `worker` and proto.
Promises: it connects when there is something to send, and again by itself; a control call has a limit and
raises only `WorkerError`.
"""
