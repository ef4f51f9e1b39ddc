"""Timing profiles made: from AIConfigurator's database, or measured on a live worker.

Owns how a point is measured. Imports workers and proto.
Promises: the optional AIConfigurator is imported only to build; times are the client's own.
"""
