"""The handoff between workers: TensorRT-LLM's `DisaggregatedParams` to and from `KvSessionRef`, sealed.

Owns the layout, which is that of TensorRT-LLM's own OpenEngine server, and the HMAC over it. Imports
`errors` and `runtime`.
Promises: a session that cannot be used is refused, with the field's name, before an engine sees it.
"""
