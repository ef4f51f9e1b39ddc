"""The worker process, of TensorRT-LLM or of its double: options, start, server, drain.

The only room that knows both `trtllm` and `sim`, and puts them behind the same port. Imports `engine_args`,
`errors`, `handoff`, `kv_transfer`, `kv_transfer/nixl`, `legs`, `logits`, `profiles`, `runtime`, `server`,
`sim`, `tls`, `trtllm`, `worker` and proto. Promises: a worker of TensorRT-LLM is reachable from its first
second, and ready once its engine has answered.
"""
