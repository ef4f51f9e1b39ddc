"""The one limit of the tests in real time."""

HANG_S = 120.0
"""A net under a test that would never end. No machine that works reaches it, however busy it is, so that
nothing depends on it: what takes time by itself is waited for by its event or its count, or is virtual."""
