"""`SimLLM`: a double of `tensorrt_llm.LLM` that needs no GPU and gives checkable tokens.

Owns the simulated engine: requests, ranks, batches, handoffs, statistics. Imports `kv_transfer`,
`profiles`, `runtime` and `sim/kv_cache`, and nothing of the adapter.
Promises: calls, results, errors and order of events of three ages of TensorRT-LLM; tokens are a function
of their context; no clock but the loop's, so that it runs in virtual time too.
"""
