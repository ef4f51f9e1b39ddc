"""How short answers are, by class: what requests to come may be like."""

from collections.abc import Collection

SHARE, STEP = 0.25, 0.1
"""The share of figures that are below a running lower quartile, and how far one of them moves it."""

UP, DOWN = 1 + SHARE * STEP, 1 - (1 - SHARE) * STEP
"""What a figure above or below moves it by: so it rests where a quarter of them are below."""

FIRST_TOKENS, N_FIRST, FIRST_SHARE = 256.0, 16, 0.5
"""What is learnt from, and the share of it that is told until so many answers have ended: who promises too
little in the first seconds loses less than who promises too much."""


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
        self._of_all = of_all * (UP if n_tokens >= of_all else DOWN)
        self._by_class[name] = of_class * (UP if n_tokens >= of_class else DOWN)
