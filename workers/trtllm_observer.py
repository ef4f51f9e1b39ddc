"""What a worker tells about its engine's work, as it happens: the port that metrics stand behind."""

from typing import Any, Literal, Protocol

Outcome = Literal["ok", "refused", "failed", "cancelled", "deadline"]
"""How a leg ended: with its answer; before the engine had it; with an error; given up; out of time."""

OUTCOMES: tuple[Outcome, ...] = ("ok", "refused", "failed", "cancelled", "deadline")


class Observer(Protocol):
    """Called on the event loop, and must not raise."""

    wants_perf_metrics: bool
    """Whether the engine is to measure each request, which costs it a little."""

    def ended(self, outcome: Outcome, result: Any | None) -> None:
        """A leg is over, and the engine done with it; `result` is the engine's, None where it had none."""

    def rows(self, rows: list[Any]) -> None:
        """Iteration statistics have come, as the engine gives them."""

    def drained(self, n_events: int) -> None:
        """One poll of KV events brought so many."""


class _Silent:
    wants_perf_metrics = False

    def ended(self, outcome: Outcome, result: Any | None) -> None:
        """Nobody is told."""

    def rows(self, rows: list[Any]) -> None:
        """Nobody is told."""

    def drained(self, n_events: int) -> None:
        """Nobody is told."""


SILENT: Observer = _Silent()
