"""Classes of requests: their shares of the traffic and their targets."""

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple


class RequestClass(NamedTuple):
    """A class of requests. Its `policy` and `weight` are for routers that have admission and fairness."""

    name: str
    share: float  # of the conversations, in (0, 1]
    ttft_ms: float
    itl_ms: float
    priority: int = 0  # higher is more important
    policy: str = "protect"  # or shed, relegate
    weight: float = 1.0
    max_tokens: int = 2048  # the cap that its requests name


def drawn(classes: Sequence[RequestClass], seed: int, conversation: int) -> RequestClass:
    """The class of a conversation.

    The first 8 bytes of SHA-256 of `SEED:ID`, as a fraction of 2^64, fall into one of the cumulated shares.
    """
    digest = sha256(f"{seed}:{conversation}".encode()).digest()
    at, end = int.from_bytes(digest[:8], "big") / 2**64, 0.0
    for each in classes:
        end += each.share
        if at < end:
            return each
    return classes[-1]
