"""`TrtllmWorker`: the `Worker` port over TensorRT-LLM's `LLM`, or over its double.

Owns the engine's requests, its parked handoffs, what it is polled for, its metrics, and whether it lives.
Imports `errors`, `handoff`, `kv_events`, `kv_transfer`, `legs`, `logits`, `runtime`, `sampling_limits`,
`worker` and proto; never `sim`, and `tensorrt_llm` itself only at run time, where it is installed.
Promises: the contract in `worker.py`; what can be refused is refused before the engine sees it.
"""
