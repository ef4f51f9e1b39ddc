"""A fleet file, read and checked: Dynamo's global-router JSON, and what slagate has besides.

Owns its keys, spellings, shape, rules and JSON schema. Imports `grid` and workers, for timing profiles.
Promises: every problem at once, each with its place in the file; what Dynamo serves loads, and means the
same.
"""
