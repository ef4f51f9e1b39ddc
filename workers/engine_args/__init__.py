"""The arguments of an engine, from files and options to what `LLM(**values)` gets.

Owns the layers and their order, the check against the model, conversion between roles, and the form in
YAML. Imports `engine_args/model`, `engine_args/rules`, `findings`, `runtime` and configs.
Promises: no engine is needed; each value knows where it came from; what is replaced is reported.
"""
