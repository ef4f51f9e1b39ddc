"""CPU and latency of relaying Generate streams: ours beside nginx and grpc.aio, on the same load."""
