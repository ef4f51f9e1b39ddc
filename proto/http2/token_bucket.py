"""Token bucket: how often a peer may do something that is cheap for the peer and not for us."""


class TokenBucket:
    """Holds `burst` tokens, and gets `per_s` more each second."""

    __slots__ = ("_burst", "_left", "_per_s", "_since_s")

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._since_s = 0.0

    def take_token(self, now_s: float) -> bool:
        """Take one token. False: there is none left.

        >>> bucket = TokenBucket(2, 1.0)
        >>> [bucket.take_token(now_s) for now_s in (5.0, 5.0, 5.0, 6.0, 6.0)]
        [True, True, False, True, False]
        """
        passed_s = now_s - self._since_s
        self._since_s = now_s
        self._left = min(self._left + passed_s * self._per_s, self._burst)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
