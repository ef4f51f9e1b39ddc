"""What requests to come will need, learnt from those that came: how long their answers are, and room.

An engine computes prompts in order of arrival, so who comes to long queues is late however important it is.
Others than protected classes may therefore make queues no longer than leaves room for the next protected
prompt, on as many rows as those have lately kept busy, and some more, since they come in bursts.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

SHARE, STEP = 0.25, 0.1
"""The share of figures that are below a running lower quartile, and how far one of them moves it."""

_UP, _DOWN = 1 + SHARE * STEP, 1 - (1 - SHARE) * STEP
"""What a figure above or below moves it by: so it rests where a quarter of them are below."""

FIRST_TOKENS, N_FIRST, FIRST_SHARE = 256.0, 16, 0.5
"""What is learnt from, and the share of it that is told until so many answers have ended: who promises too
little in the first seconds loses less than who promises too much."""

LEAST_TOKENS = 2.0
"""An answer of one token is only expected where its client asks for no more."""

OWN_PROMPTS, LEAST_SHARE = 2.0, 0.25
"""A queue leaves room where the next prompt fits behind it so many times; or where it takes no more than so
large a share of the time that the prompt itself leaves."""

BURST = 3.0
"""Room is kept on so many times the rows that are busy with protected requests on average."""

SPAN_S = 20.0
"""What came so long ago counts for a third of what comes now."""

LEAST_SPAN_S = 2.0
"""What came in the first seconds counts as if it had come in this time."""


class AnswerLengths:
    """The running lower quartile of the tokens of ended answers, by class and of all.

    Clients make up names of classes: all that are not in `listed` count as one, as no class does.
    """

    def __init__(self) -> None:
        self.listed: Collection[str] = ()
        self._of_all, self._n_all = FIRST_TOKENS, 0
        self._by_class: dict[str, float] = {}

    def short_tokens(self, name: str) -> float:
        """Tokens that three of four answers of class `name` (empty: of no class) have at least."""
        found = self._by_class.get(name if name in self.listed else "", self._of_all)
        return found * FIRST_SHARE if self._n_all < N_FIRST else found

    def observe(self, name: str, n_tokens: int) -> None:
        """Learn that an answer of class `name` had so many tokens."""
        self._n_all += 1
        name = name if name in self.listed else ""
        of_class, of_all = self._by_class.get(name, self._of_all), self._of_all
        self._of_all = max(LEAST_TOKENS, of_all * (_UP if n_tokens >= of_all else _DOWN))
        of_class *= _UP if n_tokens >= of_class else _DOWN
        self._by_class[name] = max(LEAST_TOKENS, of_class)


class KeptRoom(NamedTuple):
    """What has to stay free of others: on `n_rows` rows a protected request has to find its room."""

    n_rows: int
    ttft_s: float  # seconds that the queue of a row may take; infinite: as long as it wants
    itl_s: float  # seconds that a decode step with one more request may take; infinite: as many as it wants


class RoomKeeper:
    """Learns from each protected request of a pool how much room the next one needs."""

    __slots__ = ("_busy_s", "_first_s", "_itl_s", "_last_s", "_ttft_s")

    def __init__(self) -> None:
        self._busy_s = 0.0  # of rows, with protected requests; what is old counts for less
        self._first_s = self._last_s = -math.inf
        self._ttft_s = self._itl_s = math.inf  # running lower quartiles

    def note_ttft(self, left_s: float, own_s: float) -> None:
        """Learn that a prompt of `own_s` had to be computed in `left_s`; one that cannot be is ignored."""
        if own_s < left_s:
            room_s = max(left_s - OWN_PROMPTS * own_s, LEAST_SHARE * (left_s - own_s))
            self._ttft_s = _quartile(self._ttft_s, room_s)

    def note_itl(self, limit_s: float, alone_s: float) -> None:
        """Learn that a request bears steps of `limit_s`; less than with it alone is ignored."""
        if alone_s < limit_s:
            self._itl_s = _quartile(self._itl_s, limit_s)

    def add_busy(self, seconds: float, now_s: float) -> None:
        """Learn that a row is busy for so long with a protected request."""
        if self._first_s == -math.inf:
            self._first_s = self._last_s = now_s
        self._busy_s = self._busy_s * math.exp((self._last_s - now_s) / SPAN_S) + seconds
        self._last_s = now_s

    def kept(self, now_s: float, n_rows: int) -> KeptRoom | None:
        """The room to keep in a pool of so many rows; None: none."""
        span_s = min(SPAN_S, max(LEAST_SPAN_S, now_s - self._first_s))
        busy_s = self._busy_s * math.exp((self._last_s - now_s) / SPAN_S)
        needed = round(BURST * busy_s / span_s)
        return KeptRoom(min(n_rows, needed), self._ttft_s, self._itl_s) if needed else None


def _quartile(before: float, seen: float) -> float:
    """A running lower quartile, moved by one more figure."""
    if before == math.inf:
        return seen
    return before * (_UP if seen >= before else _DOWN)
