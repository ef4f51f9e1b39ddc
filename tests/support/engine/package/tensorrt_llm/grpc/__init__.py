"""TensorRT-LLM's gRPC servers; importing it imports nothing else (id 35992186787)."""
