"""Rules across engine arguments that are valid one by one: of one engine, and of a prefill-decode pair.

Owns the table of codes, and what each from E2 on looks for. Imports `engine_args/model`, `findings`,
`kv_transfer/nixl` and `runtime`. Promises: rules are pure; each yields findings and changes nothing.
"""
