"""Workers that fit none of the other stage: what is said of them, and when."""

import logging

import anyio
import pytest

from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.pairing import LOOK_INTERVAL_S, UnpairedWorkers, pair_statuses
from slagate.pools.inflight.row_view import State
from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime.virtual_loop import run
from support.builders import fleet, put_in
from support.fleet.watched import LOOK_S, watched
from support.worker.fake import ROLES, FakeWorker


def of_dtypes(**dtypes: str) -> Fleet:
    """The fleet of `fleet`, of which these workers have a KV cache of these types: `p1="fp8"`."""
    of = fleet()
    for member in of.members():
        info = oe.ServerInfo()
        info.extra["slagate_kv_dtype"] = dtypes.get(member.address.partition(":")[0], "bf16")
        member.set_server_info(info)
    return of


def statuses(of: Fleet) -> dict[str, tuple[int, str]]:
    found = pair_statuses(of.members())
    return {member.address: (each.n_partners, each.problem) for member, each in found.items()}


MISFIT = "fits no decode worker that is ready: KV cache type is fp8 on prefill and bf16 on decode"


def test_each_ready_worker_has_as_many_partners_as_fit_it() -> None:
    assert statuses(of_dtypes(p2="auto")) == dict.fromkeys(
        ("p1:1", "p2:1", "d1:1", "d2:1"), (2, "")
    )
    assert statuses(of_dtypes(p2="fp8")) == {
        "p1:1": (2, ""),
        "p2:1": (0, MISFIT),
        "d1:1": (1, ""),
        "d2:1": (1, ""),
    }
    assert statuses(fleet("agg")) == {}


def test_a_stage_that_is_down_or_joining_is_nobodys_misfit() -> None:
    of = of_dtypes(p1="fp8", p2="fp8")
    first, second = of.pools["decode"].members.values()
    put_in(second, State.JOINING)
    assert statuses(of)["p1:1"] == (0, "")
    for member in (first, second):
        put_in(member, State.NOT_READY)
    assert statuses(of) == {"p1:1": (0, ""), "p2:1": (0, "")}


def test_a_fleet_without_any_pair_is_not_ready() -> None:
    assert of_dtypes(p1="fp8").not_ready() == ""
    assert of_dtypes(p1="fp8", p2="fp8").not_ready() == f"each worker {MISFIT}"


def test_a_worker_without_a_partner_is_logged_once_and_when_that_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    of, now_s = of_dtypes(p2="fp8"), [0.0]
    unpaired = UnpairedWorkers(of.members, lambda: now_s[0])

    def look() -> list[tuple[str, str, str]]:
        now_s[0] += LOOK_INTERVAL_S
        caplog.clear()
        unpaired.look()
        return [(r.levelname, r.getMessage(), r.__dict__["worker"]) for r in caplog.records]

    assert look() == [("WARNING", "member.unpaired", "p2:1")]
    assert caplog.records[0].__dict__["reason"] == MISFIT
    assert look() == []
    info = oe.ServerInfo()
    info.extra["slagate_kv_dtype"] = "fp8"
    of.pools["decode"].members["d1:1"].set_server_info(info)
    assert look() == [("INFO", "member.paired", "p2:1")]
    assert look() == []


def test_the_watch_looks(caplog: pytest.LogCaptureFixture) -> None:
    def worker(role: str, dtype: str) -> FakeWorker:
        made = FakeWorker(role=ROLES[role])
        made.info.extra["slagate_kv_dtype"] = dtype
        return made

    async def main() -> None:
        workers = {"p1:1": worker("prefill", "fp8"), "p2:1": worker("prefill", "bf16")}
        workers |= {f"d{n}:1": worker("decode", "bf16") for n in (1, 2)}
        async with watched(workers):
            await anyio.sleep(3 * LOOK_S)

    run(main)
    told = [r.__dict__["worker"] for r in caplog.records if r.getMessage() == "member.unpaired"]
    assert told == ["p1:1"]
