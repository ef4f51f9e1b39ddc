"""Exponential back-off."""


class Backoff:
    """Delays between attempts in seconds: `first_s`, then each `ratio` times the last, at most `most_s`.

    >>> backoff = Backoff(0.5, 3.0)
    >>> [backoff.next_s() for _ in range(4)]
    [0.5, 1.0, 2.0, 3.0]
    """

    __slots__ = ("_delay_s", "_first_s", "_most_s", "_ratio")

    def __init__(self, first_s: float, most_s: float, *, ratio: float = 2.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._ratio = ratio
        self._delay_s = first_s

    def next_s(self) -> float:
        """Seconds to wait now; longer with each call, until `reset`."""
        delay_s = self._delay_s
        self._delay_s = min(delay_s * self._ratio, self._most_s)
        return delay_s

    def reset(self) -> None:
        """Begin with `first_s` again: an attempt went well."""
        self._delay_s = self._first_s
