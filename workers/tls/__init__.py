"""TLS of one side, from files that are followed.

Owns contexts, and which of them is current. Imports `runtime` and proto. Promises: HTTP/2 only (ALPN "h2");
files that cannot be used change nothing and are told; a connection keeps the certificates of its handshake.
"""
