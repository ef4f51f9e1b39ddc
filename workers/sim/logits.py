"""Logits of the simulated engine: only those that somebody wants to change are made.

The largest one is of the token that `blocks` says, so that a processor that changes nothing, or all of
them alike, changes no answer.
"""

from typing import Any

import numpy as np

from slagate.workers.sim.kv_cache.blocks import next_token
from slagate.workers.sim.request import SamplingParams12, SimLogitsProcessor
from slagate.workers.sim.sequence import SimSequence

_OTHERS = -10.0


def processors_of(sampling: SamplingParams12) -> tuple[SimLogitsProcessor, ...]:
    """The processors of a request. Raises `TypeError` for what is none."""
    given: Any = sampling.logits_processor
    if given is None:
        return ()
    listed = given if isinstance(given, list) else [given]
    for one in listed:
        if not isinstance(one, SimLogitsProcessor):
            raise TypeError(f"logits_processor must be LogitsProcessor, not {type(one).__name__}")
    return tuple(listed)


def drawn(sequence: SimSequence, state: bytes, vocab_size: int) -> int:
    """The token that comes after the context in `state`. Raises what a processor raises."""
    token = next_token(state, vocab_size, sequence.branch)
    if not sequence.processors:
        return token
    logits = np.full((1, 1, vocab_size), _OTHERS, dtype=np.float32)
    logits[0, 0, token] = 0.0
    token_ids = [*sequence.feed.result.prompt_token_ids, *sequence.generated]
    for processor in sequence.processors:
        processor(sequence.request_id, logits, [token_ids], None, sequence.request_id)
    return int(np.argmax(logits[0, 0]))
