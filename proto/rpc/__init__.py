"""gRPC on top of HTTP/2: messages, headers, deadlines, status, one call, the connections to one address.

Owns the bytes of gRPC and the retry of connecting. Imports `http2`.
Promises: a call ends exactly once; one that is paused keeps what came and loses none of it; while an
address cannot be reached, calls fail at once with UNAVAILABLE until the next attempt is due.
"""
