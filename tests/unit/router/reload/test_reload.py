"""The configuration in force: read, compared, put in force one at a time, and taken back."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import grpc
import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Pool
from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.pools.grid.errors import ConfigError, Problem
from slagate.proto import gateway_pb2 as gw
from slagate.router.metrics import Metrics
from slagate.router.receipts.config import config_message
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.reload import reload as reload_module
from slagate.router.reload.reload import (
    MAX_HISTORY,
    NothingBefore,
    Proposal,
    Reloaded,
    Reloader,
    put_in_force_here,
    reloading,
)
from slagate.router.request.settings import Settings
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.wait_queue import Assignment
from slagate.router.services.admin import AdminService
from support.builders import MODEL, PROFILE, ask, config, model_info, rng
from support.fleet.state import state_of
from support.gateway.context import Aborted, Context
from support.limits import HANG_S

FIRST = config("agg", {"agg": {"workers": ["w1:1", "w2:1", "w3:1"]}})
BAD = ConfigError("fleet.json", [Problem("mode", "is wrong"), Problem("pools.a", "is missing")])


def workers(*addresses: str, **more: Any) -> FleetConfig:
    return config("agg", {"agg": {"workers": list(addresses), **more}})


def refuse() -> FleetConfig:
    raise BAD


class Running:
    """What a reload reaches, without workers; `clock` is the gateway's."""

    def __init__(self, first: FleetConfig = FIRST) -> None:
        self.clock = 100.0
        prepared = prepare(first)
        in_force = Proposal(prepared, config_message(prepared, policy="slagate"))
        self.fleet = Fleet(prepared)
        self.dispatcher = Dispatcher(self.fleet, rng=rng(), config=in_force.message)
        self.receipts = ReceiptRing(in_force.message, unix_s=lambda: 1.5)
        self.metrics = Metrics()
        self.reloader = Reloader(
            in_force,
            put_in_force=put_in_force_here(self.dispatcher, self.receipts),
            metrics=self.metrics,
            now_s=lambda: self.clock,
        )

    def put(self, found: FleetConfig, **more: Any) -> Reloaded:
        return self.reloader.put(self.reloader.propose(lambda: found), **more)

    def reload(self, read: Callable[[], FleetConfig], **more: Any) -> Reloaded:
        async def main() -> Reloaded:
            return await self.reloader.reload(read, **more)

        return anyio.run(main)

    def roll_back(self, **more: Any) -> Reloaded:
        async def main() -> Reloaded:
            return await self.reloader.roll_back(**more)

        return anyio.run(main)

    def counted(self) -> dict[str, float]:
        sample = self.metrics.registry.get_sample_value
        names = ("applied", "refused")
        return {name: sample("slagate_reloads_total", {"result": name}) or 0.0 for name in names}

    def addresses(self) -> list[str]:
        return sorted(member.address for member in self.fleet.members())

    def state(self) -> object:
        """Everything that a reload may change."""
        reloader = self.reloader
        return (
            state_of(self.fleet),
            (reloader.version, reloader.since_s, list(reloader._before)),
            (self.receipts.config, self.receipts.attainment.version, self.dispatcher._config),
        )


def test_a_changed_file_is_in_force_under_its_version_everywhere() -> None:
    of = Running()
    before = of.reloader.version
    of.clock = 200.0
    result = of.reload(lambda: workers("w1:1", "w4:1"))
    assert result.applied
    assert (result.previous_version, result.proposed_version) == (before, result.version)
    assert result.changes == (
        "pool agg: + w4:1",
        "pool agg: - w2:1",
        "pool agg: - w3:1",
    )
    assert of.addresses() == ["w1:1", "w4:1"]
    assert of.reloader.version == of.receipts.config.version == result.version != before
    assert of.receipts.attainment.version == result.version
    assert (of.reloader.since_s, of.counted()) == (200.0, {"applied": 1, "refused": 0})


def with_axis(**bounds: int) -> FleetConfig:
    content = json.loads(FIRST.text)
    content["agg_pool_selection_strategy"] |= bounds
    return parse_config(content, source="f", serving=True)


@pytest.mark.parametrize("options", [{}, {"dry_run": True}])
def test_cfg_05_a_refused_file_changes_nothing_at_all(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    of = Running()
    of.put(workers("w1:1", "w4:1", max_inflight=3))
    of.dispatcher.fleet.pools["agg"].members["w1:1"].probe_ok()
    before = of.state()
    # What no file may be, and what loads and cannot be served: no worker, no such profile.
    broken: list[Callable[[], FleetConfig]] = [
        refuse,
        lambda: workers(),
        lambda: workers("w1:1", profile="nowhere", tp=1),
        lambda: workers("w1:1", profile=PROFILE, tp=77),
        lambda: with_axis(ttft_min_ms=900),
        lambda: with_axis(itl_min_ms=46),
        lambda: parse_config([], source="f"),
    ]
    for number, read in enumerate(broken, start=1):
        with pytest.raises(ConfigError) as caught:
            of.reload(read, **options)
        assert caught.value.problems
        assert of.state() == before
        # Whoever only asks is told, and nobody else: nothing was tried.
        n_refused = 0 if options else number
        assert of.counted() == {"applied": 1, "refused": n_refused}
        assert [each.message for each in caplog.records].count("config.refused") == n_refused


def test_a_dry_run_says_what_would_change_and_changes_nothing() -> None:
    of = Running()
    of.put(workers("w1:1"))
    before = of.state()
    result = of.reload(lambda: workers("w2:1"), dry_run=True)
    assert (result.applied, result.changes) == (False, ("pool agg: + w2:1", "pool agg: - w1:1"))
    assert result.version == result.previous_version == of.reloader.version
    assert result.proposed_version != result.version
    back = of.roll_back(dry_run=True)
    assert (back.applied, back.changes) == (False, ("pool agg: + w2:1", "pool agg: + w3:1"))
    assert of.state() == before
    assert of.counted() == {"applied": 1, "refused": 0}


def test_what_is_in_force_already_is_not_put_in_force_again() -> None:
    of = Running()
    before = of.state()
    result = of.reload(lambda: config("agg", {"agg": {"workers": ["w1:1", "w2:1", "w3:1"]}}))
    assert (result.applied, result.changes) == (False, ())
    assert result.version == result.proposed_version == result.previous_version
    assert of.state() == before
    with pytest.raises(NothingBefore):
        of.roll_back()


def test_a_version_is_of_the_content_and_not_of_how_it_is_written() -> None:
    content = json.loads(config("disagg").text)
    turned = {key: content[key] for key in reversed(content)}
    turned["pools"] = {key: content["pools"][key] for key in reversed(content["pools"])}
    versions = {
        config_message(
            prepare(parse_config(each, source=source, serving=True)), policy="slagate"
        ).version
        for each, source in ((content, "a"), (turned, "b"))
    }
    assert len(versions) == 1
    other = config_message(
        prepare(parse_config(content, source="a", serving=True)), policy="least_loaded"
    )
    assert other.version not in versions


def test_rolling_back_goes_back_step_by_step_as_far_as_is_kept() -> None:
    of = Running()
    versions = [of.reloader.version]
    for number in range(MAX_HISTORY + 3):
        versions.append(of.put(workers(f"n{number}:1")).version)
    assert len(set(versions)) == MAX_HISTORY + 4
    for wanted in reversed(versions[-MAX_HISTORY - 1 : -1]):
        result = of.roll_back()
        assert (result.applied, result.version, of.reloader.version) == (True, wanted, wanted)
    assert of.addresses() == ["n2:1"]
    before = of.state()
    with pytest.raises(NothingBefore):
        of.roll_back()
    assert of.state() == before
    # From there on it is as if the others had not been.
    of.put(workers("x:1"))
    assert of.roll_back().version == versions[-MAX_HISTORY - 1]
    with pytest.raises(NothingBefore):
        of.roll_back()


def test_what_a_rollback_left_can_be_put_in_force_again() -> None:
    of = Running()
    first = of.reloader.version
    second = of.put(workers("w9:1")).version
    assert of.roll_back().version == first
    assert of.put(workers("w9:1")).version == second
    assert of.roll_back().changes == (
        "pool agg: + w1:1",
        "pool agg: + w2:1",
        "pool agg: + w3:1",
        "pool agg: - w9:1",
    )


class Gated:
    """Reads that end when they are let; what began and ended, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.gates = {name: threading.Event() for name in ("a", "b")}

    def read(self, name: str) -> FleetConfig:
        self.order.append(f"{name} begins")
        assert self.gates[name].wait(HANG_S)
        self.order.append(f"{name} ends")
        return workers(f"{name}:1")


def test_reloads_are_one_at_a_time_and_each_is_compared_with_the_one_before() -> None:
    of, gated = Running(), Gated()
    results: dict[str, Reloaded] = {}

    async def reload(name: str) -> None:
        results[name] = await of.reloader.reload(lambda: gated.read(name))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reload, "a")
            while not gated.order:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(reload, "b")
            gated.gates["b"].set()
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert (gated.order, of.addresses()) == (["a begins"], ["w1:1", "w2:1", "w3:1"])
            gated.gates["a"].set()
        assert gated.order == ["a begins", "a ends", "b begins", "b ends"]

    anyio.run(main)
    assert results["b"].previous_version == results["a"].version
    assert results["b"].changes == ("pool agg: + b:1", "pool agg: - a:1")
    assert of.addresses() == ["b:1"]


def test_a_file_that_cannot_be_read_for_ever_keeps_no_gateway_from_its_end() -> None:
    of, source = Running(), Written(1)
    begun: list[str] = []
    ended: list[bool] = []
    go_on = threading.Event()

    def blocked() -> None:
        begun.append("a thread")
        ended.append(go_on.wait(HANG_S))

    source.on_read = source.on_stamp = blocked

    async def main() -> None:
        for watch in (False, True):
            n_begun = len(begun)
            async with reloading(of.reloader, source, watch=watch, stamp=0):
                if not watch:
                    os.kill(os.getpid(), signal.SIGHUP)
                while len(begun) == n_begun:
                    await anyio.lowlevel.checkpoint()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reload_module, "WATCH_INTERVAL_S", 0.0)
            anyio.run(main)
        assert (len(begun), ended) == (2, [])
    finally:
        go_on.set()
    assert of.addresses() == ["w1:1", "w2:1", "w3:1"]


def test_what_else_is_read_again_at_a_sighup_comes_first() -> None:
    of, source = Running(), Written(1)
    told: list[str] = []
    source.on_read = lambda: told.append("config")

    async def main() -> None:
        also = [lambda: told.append("certificates"), lambda: told.append("processes")]
        async with reloading(of.reloader, source, watch=False, stamp=0, also=also):
            os.kill(os.getpid(), signal.SIGHUP)
            with anyio.fail_after(HANG_S):
                while len(told) < 3:
                    await anyio.lowlevel.checkpoint()

    before = signal.getsignal(signal.SIGHUP)
    try:
        anyio.run(main)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told == ["certificates", "processes", "config"]


def test_after_the_block_a_sighup_does_nothing() -> None:
    of, source = Running(), Written(1)

    async def main() -> None:
        async with reloading(of.reloader, source, watch=False, stamp=0):
            pass
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    before = signal.getsignal(signal.SIGHUP)
    try:
        anyio.run(main)
        os.kill(os.getpid(), signal.SIGHUP)
        assert source.reads == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_bug_while_it_is_put_in_force_loses_nobody_who_waits_and_claims_nothing() -> None:
    of = Running(workers("w1:1", max_inflight=1))
    (member,) = of.fleet.members()
    member.set_models({MODEL: model_info()})
    member.probe_ok()
    before = (of.reloader.version, of.receipts.config.version, of.dispatcher._config.version)

    def bug(_pool: Pool, member: Member) -> None:
        if member.address == "bug:1":
            raise ZeroDivisionError

    of.fleet.on_join(bug)
    with of.dispatcher.submit(ask()) as first, of.dispatcher.submit(ask()) as second:
        assert isinstance(first.outcome, Assignment)
        assert (second.outcome, of.dispatcher.n_waiting) == (None, 1)
        with pytest.raises(ZeroDivisionError):
            of.put(workers("w1:1", "bug:1", max_inflight=1))
        assert (second.outcome, of.dispatcher.n_waiting) == (None, 1)
        after = (of.reloader.version, of.receipts.config.version, of.dispatcher._config.version)
        assert after == before
        assert of.counted() == {"applied": 0, "refused": 0}
        first.outcome.release()
        assert isinstance(second.outcome, Assignment)
        assert of.dispatcher.n_waiting == 0
        second.outcome.release()
    with pytest.raises(NothingBefore):
        of.roll_back()
    assert of.put(workers("w1:1", max_inflight=2)).previous_version == before[0]
    with of.dispatcher.submit(ask()) as third:
        assert isinstance(third.outcome, Assignment)
        third.outcome.release()


class Written:
    """A source as its files are written: `stamps` one by one, then the last for ever."""

    def __init__(self, *stamps: object) -> None:
        self.stamps: Iterator[object] = iter(stamps)
        self.last: object = None
        self.n_stamps = 0
        self.reads: list[object] = []
        self.fails = False
        self.on_read: Callable[[], None] = lambda: None
        self.on_stamp: Callable[[], None] = lambda: None

    def read(self) -> FleetConfig:
        self.reads.append(self.last)
        self.on_read()
        return refuse() if self.fails else workers(f"n{len(self.reads)}:1")

    def parse(self, text: str) -> FleetConfig:
        return refuse() if text == "bad" else workers(text)

    def stamp(self) -> object:
        self.n_stamps += 1
        self.on_stamp()
        self.last = next(self.stamps, self.last)
        return self.last


@pytest.mark.parametrize("file", ["good", "bad"])
def test_a_watched_file_is_read_once_it_stays_as_it_was_written(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload_module, "WATCH_INTERVAL_S", 0.0)
    of = Running()
    # Written while the gateway started, then in three goes, back to what was read, away for a moment, and
    # in one go.
    source = Written(1, 1, 1, 2, 3, 4, 4, 4, 5, 4, 4, None, 4, 4, 6, 6, 6)
    source.fails = file == "bad"

    async def main() -> None:
        async with reloading(of.reloader, source, watch=True, stamp=0):
            while source.n_stamps < 30:
                await anyio.lowlevel.checkpoint()

    anyio.run(main)
    assert source.reads == [1, 4, 6]
    assert of.addresses() == (["w1:1", "w2:1", "w3:1"] if source.fails else ["n3:1"])
    assert of.counted()["refused" if source.fails else "applied"] == 3


def test_a_sighup_reads_the_files_again_whatever_became_of_the_one_before() -> None:
    of = Running()
    source = Written(1)

    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    def broken() -> None:
        if len(source.reads) == 1:
            raise ZeroDivisionError
        source.fails = len(source.reads) == 2

    source.on_read = broken

    async def main() -> None:
        async with reloading(of.reloader, source, watch=False, stamp=0):
            for n in (1, 2, 3):
                hang_up()
                while len(source.reads) < n or of.reloader._one_at_a_time.locked():
                    await anyio.lowlevel.checkpoint()

    anyio.run(main)
    assert source.n_stamps == 0
    assert of.addresses() == ["n3:1"]
    assert of.counted() == {"applied": 1, "refused": 1}


class Admin:
    """The admin service over a running gateway."""

    def __init__(self) -> None:
        self.of = Running()
        self.service = AdminService(
            self.of.dispatcher,
            Settings(),
            reloader=self.of.reloader,
            source=Written(1),
            receipts=self.of.receipts,
            now_s=lambda: 130.0,
        )

    def reload(self, **fields: Any) -> gw.ReloadResponse:
        request = gw.ReloadRequest(**fields)
        return anyio.run(self.service.Reload, request, Context())

    def version(self) -> tuple[str, float]:
        listed = anyio.run(self.service.ListPools, gw.ListPoolsRequest(), Context())
        return listed.config_version, listed.config_age_s


def test_the_admin_service_reloads_and_lists_the_version_in_force() -> None:
    admin = Admin()
    first, age_s = admin.version()
    assert age_s == 30.0
    answer = admin.reload(fleet="given:1")
    assert (answer.applied, answer.previous_version) == (True, first)
    assert not answer.problems
    assert admin.of.addresses() == ["given:1"]
    assert admin.version()[0] == answer.version
    assert admin.reload().changes == ["pool agg: + n1:1", "pool agg: - given:1"]
    assert admin.reload(rollback=True).version == answer.version
    assert admin.reload(rollback=True, dry_run=True).proposed_version == first
    assert admin.reload(rollback=True).version == first
    with pytest.raises(Aborted) as caught:
        admin.reload(rollback=True)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(Aborted) as caught:
        admin.reload(rollback=True, fleet="x:1")
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert admin.version()[0] == first


def test_the_admin_service_gives_every_problem_of_a_bad_file() -> None:
    admin = Admin()
    version, _ = admin.version()
    answer = admin.reload(fleet="bad")
    assert not answer.applied
    assert (answer.version, answer.previous_version, answer.proposed_version) == (
        version,
        version,
        "",
    )
    problems = [(each.path, each.reason) for each in answer.problems]
    assert problems == [("mode", "is wrong"), ("pools.a", "is missing")]
    assert admin.version()[0] == version
