"""Timing profiles: measured seconds of prefill and decode of a model on a GPU.

Owns the tables, and how they are read between and beyond their points. Imports `runtime` and configs.
Promises: pure; `at` and `many` agree; no slope beyond a table falls.
"""
