"""What is in flight on the workers of a pool: a row for each worker and rank, an array for each figure.

Owns the rows, and the memory in which the processes of a gateway share theirs. Imports nothing of ours.
Promises: a snapshot is a frozen copy; each cell of shared memory has one writer, so readers take no lock.
"""
