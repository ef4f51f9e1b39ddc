"""Rules across engine arguments that are each valid alone: for one engine, and for a prefill-decode pair.

Owns the table of codes, and what each from E2 on looks for: rules.yaml, and functions for what has to be
computed. Imports `engine_args/model`, `findings`, `kv_transfer/nixl` and `runtime`. Promises: a rule
yields findings and changes nothing.
"""
