"""One sequence of a simulated engine's result, as the caller sees it."""

from dataclasses import dataclass, field
from typing import Any

from slagate.workers.sim_logprobs import LogprobMaker
from slagate.workers.sim_perf import RequestPerfMetrics
from slagate.workers.sim_request import DisaggregatedParams12
from slagate.workers.sim_tokenizer import SimTokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence; `token_ids`, `text` and `logprobs` are cumulative."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: None = None
    disaggregated_params: DisaggregatedParams12 | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    _n_seen: int = 0
    _n_text_seen: int = 0

    @property
    def length(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        """Tokens that are new since the previous yield."""
        return self.token_ids[self._n_seen :]

    @property
    def text_diff(self) -> str:
        """Text that is new since the previous yield."""
        return self.text[self._n_text_seen :]

    def mark_seen(self) -> None:
        """A yield: what is there now is not new any more."""
        self._n_seen, self._n_text_seen = len(self.token_ids), len(self.text)

    def extend(
        self, tokens: list[int], logprobs: list[Any], *, tokenizer: SimTokenizer | None
    ) -> None:
        """Append what is new; text only with a tokenizer."""
        self.token_ids += tokens
        self.logprobs += logprobs
        if tokenizer is not None:
            self.text += tokenizer.decode(tokens)

    def trim(self, n_tokens: int, *, tokenizer: SimTokenizer | None) -> None:
        """Take a stop word off the end."""
        if n_tokens:
            del self.token_ids[-n_tokens:], self.logprobs[-n_tokens:]
            if tokenizer is not None:
                self.text = tokenizer.decode(self.token_ids)

    @property
    def logprobs_diff(self) -> list[Any]:
        """Log probabilities that are new since the previous yield."""
        return self.logprobs[self._n_seen :]


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What a request's results contain and how often they come.

    `stream_interval` is in tokens; `tokenizer` None means no text, `logprobs` None no log
    probabilities.
    """

    streaming: bool = False
    stream_interval: int = 1
    tokenizer: SimTokenizer | None = None
    logprobs: LogprobMaker | None = None
    prompt_logprobs: tuple[Any, ...] = ()
    perf_metrics: bool = False
