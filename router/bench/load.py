"""The requests of `slagate bench`, without end: prompts of one size, or those of a trace."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from slagate.proto import openengine_pb2 as oe
from slagate.router.loadgen.loadgen import LoadRequest
from slagate.router.loadgen.trace import TraceRequest, prompt_tokens

VOCAB_SIZE = 32_000
"""Prompts are made of token ids below this, which every model of today has."""


class FixedPrompts(NamedTuple):
    """Random prompts of one size, no two alike, so that no cache has any of them."""

    isl_tokens: int
    osl_tokens: int

    def asked(self, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """Prompts, each with the number of tokens to answer it with, without end."""
        numbers = np.random.default_rng(rng.getrandbits(64))
        while True:
            prompt = numbers.integers(0, VOCAB_SIZE, self.isl_tokens)
            yield prompt.tolist(), self.osl_tokens

    def __str__(self) -> str:
        return f"ISL {self.isl_tokens}, OSL {self.osl_tokens}"


class TracePrompts(NamedTuple):
    """The prompts of a trace in its order, from the start again after its end, without its times.

    Requests that share a prefix in the trace share it here, within one pass.
    """

    name: str
    trace: Sequence[TraceRequest]

    def asked(self, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """As `FixedPrompts.asked`; a pass has other tokens than the one before."""
        while True:
            # Without a salt a level would find in the caches what the level before it has left there.
            salt = rng.getrandbits(64)
            for request in self.trace:
                salted = request._replace(hash_ids=tuple(h ^ salt for h in request.hash_ids))
                yield prompt_tokens(salted, VOCAB_SIZE).tolist(), request.osl_tokens

    def __str__(self) -> str:
        return f"trace {self.name}"


Prompts = FixedPrompts | TracePrompts


def load_requests(
    prompts: Prompts, rng: random.Random, *, model: str, metadata: tuple[tuple[str, str], ...]
) -> Iterator[LoadRequest]:
    """Requests without end, with ids of their own."""
    run_id = f"{rng.getrandbits(64):016x}"
    for number, (prompt, osl_tokens) in enumerate(prompts.asked(rng)):
        request_id = f"bench-{run_id}-{number}"
        message = oe.GenerateRequest(
            request_id=request_id,
            model=model,
            token_ids=oe.TokenIds(ids=prompt),
            # So that all answers have the size that was asked for.
            stopping=oe.StoppingOptions(max_tokens=osl_tokens, ignore_eos=True),
        )
        yield LoadRequest(0.0, request_id, message.SerializeToString(), metadata)
