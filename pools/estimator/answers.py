"""How short answers are, by class: what requests to come may be like."""

MAX_CLASSES = 1000
"""Clients make up names of classes; from then on new ones count as all together."""

SHARE, STEP = 0.25, 0.1
"""The share of answers that are shorter than told, and how far an answer moves the figure."""

_UP, _DOWN = 1 + SHARE * STEP, 1 - (1 - SHARE) * STEP

FIRST_TOKENS, N_FIRST, FIRST_SHARE = 256.0, 16, 0.5
"""What is learnt from, and the share of it that is told until so many answers have ended: who promises too
little in the first seconds loses less than who promises too much."""


class AnswerLengths:
    """The running lower quartile of the tokens of ended answers, by class and of all.

    It rises by a little with each longer answer and falls by three times as much with each shorter one, so
    it rests where a quarter are shorter.
    """

    def __init__(self) -> None:
        self._of_all, self._n_all = FIRST_TOKENS, 0
        self._by_class: dict[str, float] = {}

    def short_tokens(self, name: str) -> float:
        """Tokens that three of four answers of class `name` (empty: of no class) have at least."""
        found = self._by_class.get(name, self._of_all)
        return found * FIRST_SHARE if self._n_all < N_FIRST else found

    def observe(self, name: str, n_tokens: int) -> None:
        """Learn that an answer of class `name` had so many tokens."""
        self._n_all += 1
        of_class, of_all = self._by_class.get(name, self._of_all), self._of_all
        self._of_all = of_all * (_UP if n_tokens >= of_all else _DOWN)
        if name in self._by_class or len(self._by_class) < MAX_CLASSES:
            self._by_class[name] = of_class * (_UP if n_tokens >= of_class else _DOWN)
