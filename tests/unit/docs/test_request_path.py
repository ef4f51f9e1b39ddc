"""The stations of a request in ARCHITECTURE.md, against one that really passes them."""

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import anyio

from slagate.workers.runtime import virtual_loop
from support.gateway.simulation import Plan
from support.gateway.wire_simulation import play, wired

REPOSITORY = Path(__file__).parents[3]

Station = tuple[str, str]
"""A file, and a function in it."""

SHARED = ("proto/", "workers/client/")
"""Here the client and the worker's end use them too."""

NOT_HERE = {"workers/server.py"}
"""The workers' end of the wire is another server: grpc.aio's runs in real time only."""


def stations() -> dict[Station, int]:
    """Each station with the first number that it stands behind; variants are left out."""
    page = (REPOSITORY / "ARCHITECTURE.md").read_text()
    path = page.split("## A request")[1].split("\n* ")[0]
    found: dict[Station, int] = {}
    number = 0
    for step, file, names in re.findall(
        r"^(\d+)\. |`([\w/]+\.py)`\s+\((`[^)]*)\)", path, re.MULTILINE
    ):
        number = int(step or number)
        for name in re.findall(r"`(\w+)`", names):
            found.setdefault((file, name), number)
    return found


def watched(seen: dict[Station, None]) -> Callable[[FrameType, str, object], None]:
    """A profiler that notes the functions of the repository in the order of their first call."""

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{REPOSITORY}/"):
            seen.setdefault((code.co_filename[len(f"{REPOSITORY}/") :], code.co_name))

    return note


def test_a_request_passes_the_stations_in_the_order_of_the_page() -> None:
    seen: dict[Station, None] = {}

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        async with wired({"prefill": 1, "decode": 1}, seed=seed) as wire:
            await anyio.sleep(5)  # the workers are known by then
            sys.setprofile(watched(seen))
            try:
                (one,) = await play(wire, [Plan(at_s=0.0, prompt=[7] * 200, n_tokens=8)], rng=rng)
            finally:
                sys.setprofile(None)
        assert (one.code, len(one.tokens)) == ("OK", 8)

    virtual_loop.run(main, 1)
    numbers = stations()
    ours = {
        station: number
        for station, number in numbers.items()
        if 2 <= number <= 10 and not station[0].startswith(SHARED) and station[0] not in NOT_HERE
    }
    passed = [station for station in seen if station in ours]
    assert set(passed) == ours.keys()
    assert len(passed) > 30
    assert [ours[station] for station in passed] == sorted(ours.values())
