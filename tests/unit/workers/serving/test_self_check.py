"""What the self-check of a worker finds, over every version of the package double, in virtual time."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from slagate.workers.engine_args.build import build_engine_args
from slagate.workers.serving import self_check
from slagate.workers.serving.self_check import CheckRow, Checks, EngineCheck, run_self_check
from slagate.workers.serving.start import Started
from slagate.workers.sim.api import VERSIONS
from support import virtual_loop
from support.engine.double import Fault
from support.engine.installed import installed, options_of, started
from support.engine.workers import MODEL

ROLES = ("agg", "prefill", "decode")


def rows_of(
    role: str,
    version: str = "1.4rc",
    *,
    change: Callable[[Any], None] = lambda _: None,
    settings: dict[str, Any] | None = None,
    warm_up_limit_s: float = 300.0,
    **engine: Any,
) -> dict[str, CheckRow]:
    """The rows of an engine with qwen3's configuration of the role, by name; `change` gets the engine."""
    cli = {"model": MODEL, **engine}
    extra = Path(f"qwen3/{role}")
    args = build_engine_args(role=role, cli=cli, extra=extra, override=None)
    options = options_of(args, warm_up_limit_s=warm_up_limit_s)
    begun: list[str] = []
    checks = Checks(begun.append)

    async def main() -> None:
        one: Started = started(options)
        change(one.llm)
        if await EngineCheck(one, options, None, checks).run():
            one.llm.shutdown()  # which waits for ever where it is dead

    with installed(version, **(settings or {})):
        virtual_loop.run(main)
    rows = {row.what: row for row in checks.rows}
    assert [*rows] == [*EngineCheck.NAMES]
    assert begun == [*rows][: len(begun)], "the others were left out"
    return rows


@pytest.mark.parametrize(("version", "role"), [*itertools.product(VERSIONS, ROLES)])
def test_all_is_well_with_an_engine_that_works(version: str, role: str) -> None:
    rows = rows_of(role, version)
    handoff = "off" if role == "agg" else "ok"
    if role == "decode" and version in ("1.1", "1.2"):
        handoff = "not possible here"  # it would end the engine
    assert rows.pop("handoff to itself").result == handoff
    assert {row.result for row in rows.values()} == {"ok"}
    assert "8 tokens" in rows["request"].seen
    assert "usage 65 + 8" in rows["request"].seen
    assert "2 blocks of 32 tokens stored on GPU" in rows["KV events"].seen
    assert "numActiveRequests" in rows["statistics"].seen
    how = "polled through a queue" if version == "1.1" else "polled by calls to its process"
    assert rows["KV events"].seen.startswith(how)
    assert rows["statistics"].seen.startswith(how)
    assert "KV blocks of 32 tokens on 1 rank(s), context" in rows["capacity"].seen
    assert "not known how many" not in rows["capacity"].seen
    assert not any(row.advice for row in rows.values())


def test_what_is_switched_off_is_no_failure() -> None:
    rows = rows_of(
        "agg",
        kv_cache_config={"event_buffer_max_size": 0},
        enable_iter_perf_stats=False,
    )
    off = {row.what: row.seen for row in rows.values() if row.result == "off"}
    assert "event_buffer_max_size is 0" in off["KV events"]
    assert "enable_iter_perf_stats is off" in off["statistics"]
    assert all(row.result != "failed" for row in rows.values())


def refusing(request_type: str) -> Callable[[Any], None]:
    def change(llm: Any) -> None:
        submit = llm.generate_async

        @functools.wraps(submit)
        def generate_async(
            inputs: Any,
            sampling_params: Any = None,
            *,
            disaggregated_params: Any = None,
            **more: Any,
        ) -> Any:
            if getattr(disaggregated_params, "request_type", None) == request_type:
                raise ValueError("not with this back-end")
            return submit(
                inputs, sampling_params, disaggregated_params=disaggregated_params, **more
            )

        llm.generate_async = generate_async

    return change


@pytest.mark.parametrize(
    ("role", "refused", "result"),
    [
        ("prefill", "context_only", "failed"),
        ("prefill", "generation_only", "not possible here"),
        ("decode", "context_only", "not possible here"),
        ("decode", "generation_only", "failed"),
    ],
)
def test_a_leg_that_the_engine_refuses_fails_where_the_role_needs_it(
    role: str, refused: str, result: str
) -> None:
    rows = rows_of(role, change=refusing(refused))
    row = rows["handoff to itself"]
    assert row.result == result
    assert "not with this back-end" in row.seen
    assert bool(row.advice) == (result == "failed")
    assert rows["health"].result == "ok"


def test_without_an_answer_nothing_else_is_tried() -> None:
    rows = rows_of("agg", settings={"time_scale": 1e9}, warm_up_limit_s=1.0)
    assert rows["warm-up"].seen == "no answer in 1 s"
    assert rows["warm-up"].seconds == pytest.approx(1.0)
    assert {row.result for row in rows.values()} == {"failed", "not possible here"}


def test_the_death_of_the_engine_ends_the_check() -> None:
    def change(llm: Any) -> None:
        submit = llm.generate_async

        def generate_async(inputs: Any, *args: Any, **more: Any) -> Any:
            dies = len(inputs) == 65
            return submit([int(Fault.DIE), *inputs] if dies else inputs, *args, **more)

        llm.generate_async = generate_async

    rows = rows_of("agg", change=change)
    assert rows["request"].result == "failed"
    assert "rank 0 was terminated" in rows["request"].seen
    assert rows["health"].seen == "the engine died"


def test_polls_that_bring_nothing_fail_after_a_while() -> None:
    async def nothing(**_: Any) -> Any:
        for item in ():
            yield item

    def change(llm: Any) -> None:
        llm.get_kv_cache_events_async = llm.get_stats_async = nothing
        llm.get_kv_cache_events = llm.get_stats = lambda timeout=2: []

    rows = rows_of("agg", change=change)
    for what in ("KV events", "statistics"):
        assert rows[what].result == "failed"
        assert rows[what].seconds == pytest.approx(self_check.POLL_LIMIT_S)
        assert "poll.failed" in rows[what].advice


def test_a_request_that_goes_on_after_its_abort_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_check, "ANSWER_LIMIT_S", 1.0)

    def change(llm: Any) -> None:
        submit = llm.generate_async

        def generate_async(*args: Any, **more: Any) -> Any:
            result = submit(*args, **more)
            result.abort = lambda: None
            return result

        llm.generate_async = generate_async

    row = rows_of("agg", change=change)["abort"]
    assert row.result == "failed"
    assert "still had the request" in row.seen


@pytest.mark.parametrize(
    ("role", "settings", "seen"),
    [("agg", {"init": "fail"}, "CUDA out of memory"), ("agg", {}, ""), ("encode", {}, "")],
)
def test_the_constructor_and_the_shutdown_are_rows_too(
    role: str, settings: dict[str, Any], seen: str
) -> None:
    args = build_engine_args(role=role, cli={"model": MODEL}, extra=None, override=None)
    with installed("1.4rc", time_scale=0.0, **settings):
        rows, has_ended = anyio.run(run_self_check, options_of(args))
    assert rows[0].what == "constructor"
    assert rows[-1].what == "shutdown"
    assert has_ended == (not seen)
    if seen:
        assert (rows[0].result, rows[0].advice != "") == ("failed", True)
        assert seen in rows[0].seen
        assert {row.result for row in rows[1:]} == {"not possible here"}
    else:
        assert all(row.result != "failed" for row in rows)
