"""The admission mode in force: the file's, what an operator sets instead, and what a reload makes of it."""

from contextlib import ExitStack
from typing import Any

import anyio
import grpc
import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.grid.errors import ConfigError, Problem
from slagate.proto import gateway_pb2 as gw
from slagate.router.metrics import Metrics
from slagate.router.receipts.config import config_message
from slagate.router.receipts.record import Record
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.reload.reload import (
    NothingBefore,
    Proposal,
    Reloaded,
    reloader_here,
)
from slagate.router.request.errors import Outcome
from slagate.router.request.settings import Settings
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import Decision
from slagate.router.services.admin import AdminService
from slagate.workers.runtime.virtual_loop import run
from support.builders import MODEL, ask, config, model_info, rng
from support.gateway.context import Aborted, Context
from support.gateway.reloads import Nowhere


def file(admission: str = "shadow", **more: Any) -> FleetConfig:
    return config("agg", scheduling={"admission": admission}, **more)


class Running:
    """A gateway with two workers; `clock` is its own."""

    def __init__(self, first: FleetConfig) -> None:
        self.clock = 100.0
        prepared = prepare(first)
        in_force = Proposal(prepared, config_message(prepared, policy="slagate"))
        self.dispatcher = Dispatcher(Fleet(prepared), rng=rng(), config=in_force.message)
        for member in self.dispatcher.fleet.members():
            member.set_models({MODEL: model_info()})
            member.probe_ok()
        self.receipts = ReceiptRing(in_force.message, unix_s=lambda: 1.5)
        self.metrics = Metrics()
        self.reloader = reloader_here(
            in_force,
            self.dispatcher,
            self.receipts,
            metrics=self.metrics,
            now_s=lambda: self.clock,
        )
        self.service = AdminService(
            self.dispatcher,
            Settings(),
            reloader=self.reloader,
            source=Nowhere(),
            receipts=self.receipts,
            now_s=lambda: self.clock,
        )

    def reload(self, found: FleetConfig, **more: Any) -> Reloaded:
        async def main() -> Reloaded:
            return await self.reloader.reload(lambda: found, **more)

        return anyio.run(main)

    def set_admission(self, mode: str) -> tuple[str, str]:
        """What was in force before, and is now, as the service says."""
        answer = run(self.service.SetAdmission, gw.SetAdmissionRequest(mode=mode), Context())
        return answer.previous_mode, answer.mode

    def listed(self) -> tuple[str, str, str, str]:
        found = run(self.service.ListPools, gw.ListPoolsRequest(), Context())
        return found.admission, found.file_admission, found.spill, found.bypass

    def n_applied(self) -> float | None:
        return self.metrics.registry.get_sample_value(
            "slagate_reloads_total", {"result": "applied"}
        )


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (vars(each)["from"], vars(each)["to"])
        for each in caplog.records
        if each.message == "admission.changed"
    ]


def test_the_file_says_what_is_in_force_until_an_operator_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    of = Running(config("agg", scheduling={"admission": "shadow", "spill": "any"}))
    assert of.dispatcher.admission == "shadow"
    assert of.listed() == ("shadow", "shadow", "any", "off")
    assert of.set_admission("on") == ("shadow", "on")
    assert of.set_admission("on") == ("on", "on")
    assert (of.dispatcher.admission, of.listed()) == ("on", ("on", "shadow", "any", "off"))
    assert said(caplog) == [("shadow", "on")], "what does not change is not told"
    assert Running(config("agg")).listed() == ("off", "off", "listed", "off")


@pytest.mark.parametrize("mode", ["", "On", "true", "none", "x" * 500])
def test_what_is_no_mode_is_refused_with_what_is(mode: str) -> None:
    of = Running(file())
    with pytest.raises(Aborted) as caught:
        of.set_admission(mode)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details == f"mode: must be one of off, shadow, on (got {mode[:40]!r})"
    assert of.dispatcher.admission == "shadow"


def test_another_file_sets_its_own_mode_and_so_does_the_way_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    of = Running(file())
    of.set_admission("on")
    assert of.reload(file("off")).changes == (
        "scheduling: admission shadow -> off",
        "admission in force on -> off",
    )
    assert of.dispatcher.admission == "off"
    of.set_admission("on")
    assert anyio.run(of.reloader.roll_back).changes == (
        "scheduling: admission off -> shadow",
        "admission in force on -> shadow",
    )
    assert (of.dispatcher.admission, of.listed()[1]) == ("shadow", "shadow")
    assert said(caplog) == [("shadow", "on"), ("on", "off"), ("off", "on"), ("on", "shadow")]


def test_what_an_operator_set_and_the_file_says_now_is_no_change_of_mode() -> None:
    of = Running(file("off"))
    of.set_admission("on")
    assert of.reload(file("on")).changes == ("scheduling: admission off -> on",)
    assert of.listed()[:2] == ("on", "on")


def test_the_same_file_again_sets_its_mode_and_changes_nothing_else() -> None:
    of = Running(file())
    record = Record(99.0)
    record.decision = of.dispatcher.explain(ask())
    of.receipts.add_receipt(record, Outcome.COMPLETED, 99.5)
    assert len(of.receipts.attainment.cells) == 1
    of.set_admission("on")
    of.clock = 200.0
    told = of.reload(file(), dry_run=True)
    assert (told.applied, told.changes) == (False, ("admission in force on -> shadow",))
    assert of.dispatcher.admission == "on"
    result = of.reload(file())
    assert (result.applied, result.changes) == (False, ("admission in force on -> shadow",))
    assert result.version == result.previous_version == of.reloader.version
    assert of.dispatcher.admission == "shadow"
    assert (of.reloader.since_s, of.n_applied()) == (100.0, 0.0)
    assert len(of.receipts.attainment.cells) == 1, "counts go on"
    with pytest.raises(NothingBefore):
        anyio.run(of.reloader.roll_back)
    assert of.reload(file()).changes == ()


def test_a_file_that_is_refused_leaves_the_mode_that_was_set() -> None:
    of = Running(file())
    of.set_admission("on")

    async def refuse(_: Proposal) -> None:
        raise ConfigError("config", [Problem("$", "process 1: no")])

    of.reloader._agree = refuse
    for found in (file(), file("off")):
        with pytest.raises(ConfigError):
            of.reload(found)
        assert of.listed()[:2] == ("on", "shadow")


def test_waiting_requests_are_decided_again_under_the_mode_of_the_new_file() -> None:
    """Who decides them asks the dispatcher, which has the new mode by then."""
    of = Running(file("off", pools={"agg": {"max_inflight": 1}}))
    seen: list[str] = []
    choose = of.dispatcher._choose_workers

    def noting(*args: Any, **more: Any) -> Decision:
        seen.append(of.dispatcher.admission)
        return choose(*args, **more)

    of.dispatcher._choose_workers = noting
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(of.dispatcher.submit(ask()))
        assert of.dispatcher.n_waiting == 1
        seen.clear()
        of.reload(file("on", pools={"agg": {"max_inflight": 1}}))
        assert seen == ["on"]
