"""An engine's KV events: read, checked and numbered, and served to subscribers.

Owns each rank's numbered history and its published blocks. Imports `errors`, `runtime` and proto.
Promises: never more is published than the engine has; a slow subscriber loses only its own place; numbers
belong to one incarnation of the worker.
"""
