"""Clients' connections: HTTP/2, Generate streams, limits, and the proxy for every other method.

Owns each connection, requests that are arriving, output that waits for a client. Imports `metrics`,
`request`, workers and proto.
Promises: what waits is bounded in bytes and in time; a client that stays gets a status for each call.
"""
