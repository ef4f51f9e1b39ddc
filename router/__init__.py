"""Router: the request path, the policy that chooses, and the services that clients and operators call.

Owns requests. May import everything below it: `slagate.pools`, `slagate.workers`, `slagate.proto`.
"""
