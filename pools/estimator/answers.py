"""How long answers are, by class: what requests to come are expected to need."""

MAX_CLASSES = 1000
"""Clients make up names of classes; from then on new ones count as the mean of all."""

GAIN = 0.05
"""The weight of an answer in the running mean."""

FIRST_TOKENS = 256.0
"""Expected before the first answer has ended."""


class AnswerLengths:
    """The running mean of the tokens of ended answers, by class and of all."""

    def __init__(self) -> None:
        self._of_all = FIRST_TOKENS
        self._by_class: dict[str, float] = {}

    def expected(self, name: str) -> float:
        """Tokens that an answer of class `name` (empty: of no class) is expected to have."""
        return self._by_class.get(name, self._of_all)

    def observe(self, name: str, n_tokens: int) -> None:
        """Learn that an answer of class `name` had so many tokens."""
        self._of_all += GAIN * (n_tokens - self._of_all)
        mean = self._by_class.get(name, self._of_all)
        if name in self._by_class or len(self._by_class) < MAX_CLASSES:
            self._by_class[name] = mean + GAIN * (n_tokens - mean)
