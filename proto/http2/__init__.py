"""One HTTP/2 connection over an asyncio transport, as a client or as a server.

Owns streams, windows, writing, keepalive, GOAWAY and what a peer may do at no cost. Imports nothing of
ours. Promises: only `engine.py` knows libnghttp2; a handler is told `closed` once at most, and nothing
after it; what is written within one turn of the event loop goes out together.
"""
