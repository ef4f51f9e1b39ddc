"""`slagate worker`: a worker process, and check and convert for engine arguments.

Owns the options of a worker, of both engines. Imports `cli`, workers and proto.
Promises: check and convert need no engine and no GPU.
"""
