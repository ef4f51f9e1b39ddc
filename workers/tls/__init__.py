"""TLS of a server or a client, from files that are read again when they change.

Owns contexts, and which of them is current. Imports `runtime` and proto. Promises: HTTP/2 only (ALPN "h2");
files that cannot be used change nothing and are logged; a connection keeps the certificates of its
handshake.
"""
