"""Router: the request path, the policy that chooses, the services, and every command.

Owns requests. May import everything below it: `slagate.pools`, `slagate.workers`, `slagate.proto`.
`generate.py` is one request from top to bottom, `app.py` the gateway process.
"""
