"""What `slagate bench` asks: prompts of one size, or those of a trace, as endless requests."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from slagate.proto import openengine_pb2 as oe
from slagate.router.loadgen.loadgen import LoadRequest
from slagate.router.loadgen.trace import TraceRequest, prompt_tokens

VOCAB_SIZE = 32_000
"""Prompts are made of the ids below it, which every model of today has."""


class Prompts(Protocol):
    """Where prompts come from."""

    def asked(self, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """Prompts, and the tokens to answer each with, without end; another `rng`, other tokens."""

    def __str__(self) -> str:
        """What they are, for people."""


class FixedPrompts(NamedTuple):
    """Random prompts of one size, no two alike: nothing of them is in any cache."""

    isl_tokens: int
    osl_tokens: int

    def asked(self, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """As `Prompts.asked`."""
        numbers = np.random.default_rng(rng.getrandbits(64))
        while True:
            prompt = numbers.integers(0, VOCAB_SIZE, self.isl_tokens)
            yield prompt.tolist(), self.osl_tokens

    def __str__(self) -> str:
        """As `Prompts.__str__`."""
        return f"ISL {self.isl_tokens}, OSL {self.osl_tokens}"


class TracePrompts(NamedTuple):
    """The prompts of a trace in its order, from the start again after its end.

    What its requests share they share here, within one pass. Its times do not count.
    """

    name: str
    trace: Sequence[TraceRequest]

    def asked(self, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """As `Prompts.asked`."""
        while True:
            # Else a level would find in the caches what the level before it has left there.
            salt = rng.getrandbits(64)
            for request in self.trace:
                salted = request._replace(hash_ids=tuple(h ^ salt for h in request.hash_ids))
                yield prompt_tokens(salted, VOCAB_SIZE).tolist(), request.osl_tokens

    def __str__(self) -> str:
        """As `Prompts.__str__`."""
        return f"trace {self.name}"


def load_requests(
    prompts: Prompts,
    rng: random.Random,
    *,
    model: str,
    metadata: tuple[tuple[str, str], ...],
) -> Iterator[LoadRequest]:
    """Requests without end, with ids of their own."""
    run_id = f"{rng.getrandbits(64):016x}"
    for number, (prompt, osl_tokens) in enumerate(prompts.asked(rng)):
        request_id = f"bench-{run_id}-{number}"
        message = oe.GenerateRequest(
            request_id=request_id,
            model=model,
            token_ids=oe.TokenIds(ids=prompt),
            # All answers are of the size that was asked for, whatever the model has to say.
            stopping=oe.StoppingOptions(max_tokens=osl_tokens, ignore_eos=True),
        )
        yield LoadRequest(0.0, request_id, message.SerializeToString(), metadata)
