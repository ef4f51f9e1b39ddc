"""The one limit of real time that tests know."""

HANG_S = 300.0
"""A net under what would hang for ever. Nothing that works comes near it, however busy the machine is.

What takes time by itself is waited for by its event or its count, or is virtual. A test that is about a
time limit of the product has it in virtual time, or long enough for the same.
"""
