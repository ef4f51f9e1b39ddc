"""The loads, and the files of messages that the C programs read."""

import random
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from slagate.pools.prefix.overlap import Prompt
from slagate.proto import openengine_pb2 as oe
from support.builders import MODEL

ID = "0" * 16
"""The place of a request's id: the client writes each one's own number there."""

N_PROMPTS = 32
FIRST_TOKEN, LAST_TOKEN = 1 << 14, 128_000
"""Token ids that have three bytes each, so that one can be changed in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What clients ask for, and how workers answer."""

    about: str
    n_tokens: int = 1024  # of a prompt
    n_messages: int = 16  # of an answer; of a paced one as many as there is time for
    in_flight: int = 32
    rate: float = 0.0  # requests a second; 0: as many as can be with so many in flight
    pace_us: int = 0  # between two messages of a stream; 0: all at once
    spread: bool = False  # each stream in moments of its own
    variants: tuple[str, ...] = ("direct", "nginx", "fixed", "full")

    @property
    def per(self) -> str:
        """What CPU is counted by."""
        return "message" if self.pace_us else "request"

    def lasting(self, seconds: float) -> "Workload":
        """With streams of that length, where they are paced."""
        if not self.pace_us:
            return self
        return replace(self, n_messages=round(seconds * 1e6 / self.pace_us))


WORKLOADS = {
    "W1": Workload(
        about="1k prompt, 16 messages, saturated",
        variants=("direct", "nginx", "bare", "fixed", "full", "aio"),
    ),
    "W1h": Workload(
        about="1k prompt, 16 messages, 400 requests a second",
        rate=400.0,
        variants=("direct", "nginx", "bare", "fixed", "full"),
    ),
    "W2p": Workload(
        about="64 streams, a message each 10 ms, all of a worker in the same moment",
        in_flight=64,
        pace_us=10_000,
    ),
    "W2s": Workload(
        about="64 streams, a message each 10 ms, each in moments of its own",
        in_flight=64,
        pace_us=10_000,
        spread=True,
    ),
    "W3": Workload(
        about="32k prompt, 1 message, saturated",
        n_tokens=32_768,
        n_messages=1,
        variants=("direct", "nginx", "bare", "fixed", "full"),
    ),
}


def prompts(n_tokens: int) -> list["array[int]"]:
    """The same ones each time."""
    numbers = random.Random(n_tokens)
    return [
        array("I", (numbers.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(n_tokens)))
        for _ in range(N_PROMPTS)
    ]


def cached_halves(n_tokens: int) -> list[Prompt]:
    """The part of each prompt that is the same in every request with it."""
    return [Prompt(prompt[: n_tokens // 2].tobytes()) for prompt in prompts(n_tokens)]


def write_requests(path: Path, workload: Workload) -> int:
    """The clients' file; the byte at which each message's second half of the prompt begins."""
    messages, offsets = [], set()
    for prompt in prompts(workload.n_tokens):
        half = workload.n_tokens // 2
        data = oe.GenerateRequest(
            request_id=ID,
            model=MODEL,
            token_ids=oe.TokenIds(ids=prompt),
            stopping=oe.StoppingOptions(max_tokens=workload.n_messages, ignore_eos=True),
        ).SerializeToString()
        # The packed tokens are one run of bytes, so its second half is that of a list of half as many.
        tail = oe.TokenIds(ids=prompt[half:]).SerializeToString()[-3 * (workload.n_tokens - half) :]
        offsets.add(data.index(tail))
        messages.append(data)
    _write(path, messages)
    (offset,) = offsets
    return offset


def write_answer(path: Path, workload: Workload) -> int:
    """A worker's file, without request ids, as one streams with a detokenizer; its bytes in all."""
    messages = [
        oe.GenerateResponse(
            token=oe.TokenOutput(
                output_index=0, tokens=[oe.TokenInfo(token_id=20_000 + number)], text=" words"
            )
        )
        for number in range(workload.n_messages - 1)
    ]
    n_tokens = workload.n_messages
    usage = oe.Usage(
        prompt_tokens=workload.n_tokens,
        completion_tokens=n_tokens,
        total_tokens=workload.n_tokens + n_tokens,
        cached_prompt_tokens=workload.n_tokens // 2,
    )
    reason = oe.FINISH_REASON_LENGTH
    finished = oe.GenerationFinished(output_index=0, reason=reason)
    messages.append(oe.GenerateResponse(finished=finished, usage=usage))
    written = [message.SerializeToString() for message in messages]
    _write(path, written)
    return sum(map(len, written))


def _write(path: Path, messages: Iterable[bytes]) -> None:
    path.write_bytes(b"".join(struct.pack(">I", len(data)) + data for data in messages))
