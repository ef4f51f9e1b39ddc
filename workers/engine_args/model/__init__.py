"""The arguments that an engine may have, and the words for what is wrong with them.

Owns names, types, ranges and defaults as TensorRT-LLM has them, merging, and the codes of findings.
Imports nothing of ours. Stands apart from the double's own arguments, which a test compares it with.
"""
