"""Workers: one worker, from either end of the wire, and the engine behind it.

Owns the `Worker` port, its gRPC client and server, the TensorRT-LLM adapter, the double of the engine, and
the worker process. May import `slagate.proto` and `slagate.configs` only.
"""
