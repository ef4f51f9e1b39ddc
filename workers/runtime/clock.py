"""The clocks of a process, for its outermost functions; the others get `now_s` as an argument.

An event loop's own time may have a resolution of only a millisecond, which is most of a fast token.
"""

from time import monotonic as monotonic_s  # noqa: TID251
from time import time as unix_s  # noqa: TID251
from time import time_ns as unix_nanos

__all__ = ["monotonic_s", "unix_nanos", "unix_s"]
