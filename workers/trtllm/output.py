"""One output of a request: the engine's cumulative tokens, text and log probabilities as deltas.

The engine removes a stop that the answer must not show, but only once the stop is whole, and what was sent
cannot be taken back. So whatever could still become part of a stop is held back, both tokens, by which the
engine matches, and text.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from slagate.proto import openengine_pb2 as oe
from slagate.workers.handoff.codec import logprob_of

MAX_PROMPT_ENTRIES = 100_000
"""Log probabilities of a prompt in its answer, which takes one turn of the event loop: so many take about a
fifth of a second. TensorRT-LLM's own server allows ten times as many."""

UNFINISHED_CHARACTER = "\ufffd"
"""A detokenizer's output for a character of which some bytes are still to come."""


class HiddenStop(NamedTuple):
    """A stop that the answer must not show: its text ("" for a token), and its tokens."""

    text: str
    tokens: tuple[int, ...]


class StopRule(NamedTuple):
    """A stop condition: the text or token that the answer names, and the tokens that it is found by."""

    cause: str | int
    tokens: tuple[int, ...]


class OutputForm(NamedTuple):
    """What the answer to a request contains."""

    n_outputs: int = 1
    top_n: int | None = None  # candidates a token; None: no log probabilities at all
    prompt_top_n: int | None = None  # the same for the prompt
    has_text: bool = False
    hidden_stops: tuple[HiddenStop, ...] = ()
    stops: tuple[StopRule, ...] = ()  # all of them
    end_id: int | None = None  # the end of text; None: it ends nothing
    min_tokens: int = 0  # so many are not ended by the end of text
    decode: Callable[[list[int]], str] | None = None  # makes text of tokens


class OutputCursor:
    """How much of one output has been sent.

    tokens   sent │ new, to be sent now │ held back: may become a stop
                  n_tokens              visible                      len(token_ids)
    """

    def __init__(self, index: int, form: OutputForm, *, n_lagging: int = 0) -> None:
        """`n_lagging` tokens at the front have no log probabilities, as prefill made them."""
        self.index = index
        self.finished = False
        self._form = form
        self._n_tokens = 0
        self._n_text = 0
        self._n_lagging = n_lagging
        self._text_overlaps = [StopOverlap(stop.text) for stop in form.hidden_stops if stop.text]
        self._token_overlaps = [
            StopOverlap(stop.tokens) for stop in form.hidden_stops if stop.tokens
        ]
        # (tokens, characters that these surely decode to), oldest first: how far the text goes without the
        # tokens held back. Only results tell, as tokens may decode to other text alone than together.
        self._lengths: deque[tuple[int, int]] = deque([(0, 0)])

    def take_delta(self, output: Any, made: oe.TokenOutput) -> bool:
        """Make `made` what is new and will not be taken back; with the last result, all the rest.

        False, with `made` as it was: nothing is new.
        """
        form, n_sent = self._form, self._n_tokens
        tokens: Sequence[int] = output.token_ids
        n_tokens, new_text = len(tokens), ""
        if self._token_overlaps and output.finish_reason is None:
            n_tokens -= _held(tokens, self._token_overlaps)
        if form.has_text:
            new_text = self._new_text(output, n_tokens)
        if n_tokens <= n_sent and not new_text:
            return False
        made.output_index, made.text = self.index, new_text
        del made.tokens[:]
        if form.top_n is None:
            for token in tokens[n_sent:n_tokens]:
                made.tokens.add(token_id=token)
        else:
            entries, n_lagging = output.logprobs, self._n_lagging
            for at in range(n_sent, n_tokens):
                has_entry = n_lagging <= at < n_lagging + len(entries)
                entry = entries[at - n_lagging] if has_entry else None
                made.tokens.append(token_info(tokens[at], entry, form.top_n))
        self._n_tokens = max(n_sent, n_tokens)
        return True

    def _new_text(self, output: Any, n_tokens: int) -> str:
        """The text that is new and will not be taken back, where that is so of the first `n_tokens`."""
        text: str = output.text
        n_text = len(text)
        if output.finish_reason is None:
            n_text = self._visible_text(text, n_tokens, len(output.token_ids))
        elif self._form.hidden_stops:
            n_text = self._final_text(text, n_tokens)
        new, self._n_text = text[self._n_text : n_text], max(self._n_text, n_text)
        return new

    def _visible_text(self, text: str, n_visible: int, n_tokens: int) -> int:
        """How many first characters of `text`, which `n_tokens` made, the engine will not take back."""
        n_text = len(text.rstrip(UNFINISHED_CHARACTER))
        if not self._form.hidden_stops:
            return n_text
        self._lengths.append((n_tokens, n_text))
        while len(self._lengths) > 1 and self._lengths[1][0] <= n_visible:
            self._lengths.popleft()
        held = _held(text[:n_text], self._text_overlaps)
        # A stop's tokens may decode to more than its text: a leading space, say.
        return min(n_text - held, self._lengths[0][1])

    def _final_text(self, text: str, n_tokens: int) -> int:
        """How many first characters of an ended output's `text` are its answer's, which has `n_tokens`.

        A stream's text only grows, so an engine that takes the tokens of a stop back leaves the text that
        it had made of them.
        """
        n_seen, n_text_seen = self._lengths[-1]
        if n_tokens > n_seen or len(text) < n_text_seen:
            return len(text)
        known = dict(self._lengths).get(n_tokens)
        if known is not None:
            return min(len(text), known)
        return len(text) - _held(
            text, [StopOverlap(s.text) for s in self._form.hidden_stops if s.text]
        )


def _held(sequence: Sequence[Any], overlaps: Sequence["StopOverlap"]) -> int:
    """The number of items at the end that are the beginning of a stop."""
    return max((overlap.follow(sequence) for overlap in overlaps), default=0)


class StopOverlap:
    """How many items at the end of a growing sequence are the beginning of `stop`, or all of it.

    The prefix function of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977), computed as far as it is
    needed. So the cost of an item does not depend on the length of the stop, nor on earlier items.
    """

    __slots__ = ("_borders", "_n_held", "_n_seen", "_stop")

    def __init__(self, stop: Sequence[Any]) -> None:
        self._stop = stop
        self._n_seen = 0
        self._n_held = 0
        # At n: the length of the longest end of the stop's first n items that is a beginning of the stop.
        self._borders = [0, 0]

    def follow(self, sequence: Sequence[Any]) -> int:
        """The overlap of the sequence, which is the one of the last call with more items at its end.

        >>> [StopOverlap("hello").follow(text) for text in ("say hel", "hello", "hellhe")]
        [3, 5, 2]
        """
        for i in range(self._n_seen, len(sequence)):
            self._n_held = self._step(self._n_held, sequence[i])
        self._n_seen = max(self._n_seen, len(sequence))
        return self._n_held

    def _step(self, n_held: int, item: Any) -> int:
        stop, borders = self._stop, self._borders
        if n_held == len(stop):
            n_held = borders[n_held]
        while n_held and stop[n_held] != item:
            n_held = borders[n_held]
        if stop[n_held] != item:
            return 0
        n_held += 1
        if n_held == len(borders):
            n = borders[-1]
            while n and stop[n] != item:
                n = borders[n]
            borders.append(n + (stop[n] == item))
        return n_held


def token_info(token_id: int, entry: Any, top_n: int | None) -> oe.TokenInfo:
    """A token with its log probability and `top_n` candidates, as far as the engine's entry has them.

    The entry is {token id: Logprob}, which may lack the token itself, or a number, or None.
    """
    info = oe.TokenInfo(token_id=token_id)
    if entry is None:
        return info
    if not isinstance(entry, dict):
        info.logprob = logprob_of(entry)
        return info
    if token_id in entry:
        info.logprob = logprob_of(entry[token_id])
        if (rank := getattr(entry[token_id], "rank", None)) is not None:
            info.rank = rank
    if top_n:
        best = sorted(entry.items(), key=lambda item: (-logprob_of(item[1]), item[0]))[:top_n]
        info.candidates.extend(
            oe.LogProb(token_id=token, logprob=logprob_of(one), rank=getattr(one, "rank", None))
            for token, one in best
        )
    return info


def prompt_output(tokens: Sequence[int], entries: Sequence[Any], top_n: int) -> oe.PromptOutput:
    """The prompt with its log probabilities. The first token has none, as no token comes before it.

    An engine gives an entry for each token, or for each but the first.
    """
    n_missing = len(tokens) - len(entries)
    infos = [oe.TokenInfo(token_id=tokens[0])]
    for i in range(1, len(tokens)):
        entry = entries[i - n_missing] if 0 <= i - n_missing < len(entries) else None
        infos.append(token_info(tokens[i], entry, top_n))
    return oe.PromptOutput(tokens=infos)


def n_prompt_entries(entries: Sequence[Any], top_n: int) -> int:
    """How many log probabilities of a prompt `prompt_output` would have to read."""
    if not top_n:
        return len(entries)
    return sum(len(entry) if isinstance(entry, dict) else 1 for entry in entries)


def ends_at_first_token(output: Any, form: OutputForm, *, max_tokens: int | None) -> bool:
    """Whether a decode leg's first token is its last one, of which no engine takes notice.

    The engine does not check the token that came with the handoff, and generates at least one more. If it
    is the last, `output` is cut to it and has its text and reason, which may be a stop in that text.
    """
    first = output.token_ids[:1]
    if not first:
        return False
    stops = any(rule.tokens == tuple(first) for rule in form.stops)
    if first[0] == form.end_id:
        stops = not form.min_tokens
    if not (stops or max_tokens == 1):
        return False
    output.token_ids, output.finish_reason, output.stop_reason = first, None, None
    output.text = "" if form.decode is None else form.decode(first)
    settle_end(output, form)
    for cause, _ in form.stops:
        if isinstance(cause, str) and cause in output.text:
            shown, stop, _ = output.text.partition(cause)
            output.text = shown if form.hidden_stops else shown + stop
            output.finish_reason, output.stop_reason = "stop", cause
            break
    return True


def settle_end(output: Any, form: OutputForm) -> None:
    """Give an ended output of the engine's the reason and the tokens that its own tokens say.

    Engines before 1.3 give only the output that ends last a reason, and cut off only its stop. All of them
    let a stop pass that comes with the last token of the budget, also in the text, and cut one that they
    found in the text off the text alone.
    """
    tokens = output.token_ids
    if output.finish_reason is None:
        output.finish_reason = "length"
        if tokens and tokens[-1] == form.end_id:
            output.finish_reason = "stop"
            return
    in_text = output.finish_reason == "stop" and isinstance(output.stop_reason, str)
    if output.finish_reason != "length" and not in_text:
        return
    for cause, stop in form.stops:
        if in_text and cause != output.stop_reason:
            continue
        if stop and tuple(tokens[-len(stop) :]) == stop:
            output.finish_reason, output.stop_reason = "stop", cause
            if form.hidden_stops:
                output.token_ids = tokens[: -len(stop)]
                if form.decode is not None and not in_text:
                    output.text = form.decode(output.token_ids)
            return


def finished(index: int, output: Any, form: OutputForm, *, end_id: int) -> oe.GenerationFinished:
    """The end of one output. A stop token that the request did not name is an end that the model names."""
    made = oe.GenerationFinished(output_index=index)
    if output.finish_reason == "stop":
        made.reason = oe.FINISH_REASON_STOP
        if isinstance(output.stop_reason, int):
            is_named = any(rule.cause == output.stop_reason for rule in form.stops)
            name = "stop_token_id" if is_named else "eos_token_id"
            setattr(made.stop_match, name, output.stop_reason)
        elif isinstance(output.stop_reason, str):
            made.stop_match.stop_text = output.stop_reason
        else:
            made.stop_match.eos_token_id = end_id
    elif output.finish_reason in ("length", "not_finished"):
        made.reason = oe.FINISH_REASON_LENGTH
    else:
        made.reason = oe.FINISH_REASON_CANCELLED
        made.message = str(output.finish_reason)
    return made
