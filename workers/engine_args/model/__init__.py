"""The arguments that an engine may have, and how layers of them are merged.

Owns their names, types, ranges and defaults, which are those of TensorRT-LLM. Imports nothing of ours.
Stands apart from the double's own arguments: a test compares the two.
"""
