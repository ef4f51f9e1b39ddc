"""Predicted prefill and inter-token seconds of a pool, corrected by what its requests really took.

Owns the coefficients of a pool. Imports workers, for timing profiles.
Promises: decisions get a frozen copy, so that they can be made again; queues are sums of uncorrected work.
"""
