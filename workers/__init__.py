"""Workers: the `Worker` port, its gRPC client and server, and the TensorRT-LLM engine adapter.

Owns everything about one worker. May import `slagate.proto` and `slagate.configs` only.
"""
