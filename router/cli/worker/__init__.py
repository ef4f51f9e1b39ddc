"""`slagate worker`: `sim` and `trtllm` run a worker; `check` and `convert` are for engine arguments.

Owns the options of a worker, of each engine. Imports `cli`, `tables`, workers, configs and proto.
Promises: check and convert need no engine and no GPU.
"""
