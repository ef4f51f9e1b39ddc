"""`SimLLM`: a double of `tensorrt_llm.LLM` that needs no GPU and gives checkable tokens.

Owns the simulated engine: requests, ranks, batches, handoffs, statistics. Imports `kv_transfer`,
`profiles`, `runtime` and `sim/kv_cache`, and nothing of the adapter.
Promises: calls, results, errors and order of events are those of four versions of TensorRT-LLM. A token is
a function of its context. The loop's clock is the only one, so the engine runs in virtual time too.
"""
