"""An engine's KV events: checked and numbered on one side, served to subscribers on the other.

Owns each rank's numbered history and its published blocks. Imports `errors`, `runtime` and proto.
Promises: what is published is never more than the engine has; a subscriber that is slow costs only its
place; numbers belong to one incarnation of the worker.
"""
