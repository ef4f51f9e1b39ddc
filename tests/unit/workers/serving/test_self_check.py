"""What the self-check of a worker finds, over every version of the package double, in virtual time."""

import asyncio
import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from slagate.workers.engine_args.build import build_engine_args
from slagate.workers.runtime import virtual_loop
from slagate.workers.runtime.usage import UsageError
from slagate.workers.serving import self_check
from slagate.workers.serving.self_check import (
    NOT_POSSIBLE,
    CheckRow,
    EngineCheck,
    run_self_check,
)
from slagate.workers.sim.api import VERSIONS
from slagate.workers.trtllm.events import EngineEvents
from slagate.workers.trtllm.watch import WatchTimes
from support.engine.double import Fault
from support.engine.installed import installed, options_of
from support.engine.workers import MODEL

ROLES = ("agg", "prefill", "decode")


def rows_of(
    role: str,
    version: str = "1.4rc",
    *,
    change: Callable[[Any], None] = lambda _: None,
    settings: dict[str, Any] | None = None,
    run: Callable[..., tuple[list[CheckRow], bool]] = virtual_loop.run,
    extra: str = "qwen3",
    options: dict[str, Any] | None = None,
    **engine: Any,
) -> dict[str, CheckRow]:
    """The rows of an engine with a configuration of the role, by name; `change` gets the engine."""
    args = build_engine_args(
        role=role,
        cli={"model": MODEL},
        extra=Path(f"{extra}/{role}"),
        override=json.dumps(engine),
    )

    def constructed(**values: Any) -> Any:
        llm = make(**values)
        change(llm)
        return llm

    with installed(version, **(settings or {})):
        package: Any = sys.modules["tensorrt_llm"]
        make, package.LLM = package.LLM, constructed
        found, _ = run(run_self_check, options_of(args, **(options or {})))
    rows = {row.what: row for row in found}
    assert [*rows] == ["constructor", *EngineCheck.NAMES, "shutdown"]
    assert len(found) == len(rows)
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
    assert rows["shutdown"].seen == "ended within 60 s"
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
    rows = rows_of("agg", settings={"time_scale": 1e9}, options={"warm_up_limit_s": 1.0})
    assert rows["warm-up"].seen == "no answer in 1 s"
    assert rows["warm-up"].seconds == pytest.approx(1.0)
    rest = [rows[name] for name in EngineCheck.NAMES[1:]]
    assert {(row.result, row.seen) for row in rest} == {("not run", "no warm-up")}
    assert rows["shutdown"].result == "ok"


def with_fault(fault: Fault, nth: int) -> Callable[[Any], None]:
    """Have the engine's `nth` request be faulty: the first is the warm-up's, the second the canary's."""

    def change(llm: Any) -> None:
        submit, requests = llm.generate_async, itertools.count(1)

        @functools.wraps(submit)
        def generate_async(inputs: Any, *args: Any, **more: Any) -> Any:
            begin = [int(fault)] if next(requests) == nth else []
            return submit([*begin, *inputs[len(begin) :]], *args, **more)

        llm.generate_async = generate_async

    return change


def test_the_death_of_the_engine_ends_the_check() -> None:
    rows = rows_of("agg", change=with_fault(Fault.DIE, 3))
    assert rows["request"].result == "failed"
    assert "rank 0 was terminated" in rows["request"].seen
    for name in ("health", "shutdown"):
        assert rows[name].result == "not run"
        assert rows[name].seen.startswith("the engine died: ")
        assert "rank 0 was terminated" in rows[name].seen


@pytest.mark.parametrize("version", ["1.2", "1.3rc", "1.4rc"])
@pytest.mark.parametrize(("nth", "during"), [(1, "warm-up"), (3, "request"), (4, "abort")])
def test_a_dead_engine_is_found_by_what_it_knows_of_itself(
    version: str, nth: int, during: str
) -> None:
    """On real time, as the watch's thread has that; no limit of a check is reached."""
    rows = rows_of(
        "prefill",
        version,
        change=with_fault(Fault.QUIT, nth),
        settings={"time_scale": 0.0},
        run=anyio.run,
        options={"watch": WatchTimes(flag_s=0.01)},
    )
    assert rows[during].result == "failed"
    assert rows[during].seconds < self_check.ANSWER_LIMIT_S
    assert rows["shutdown"].result == "not run"
    assert rows["shutdown"].seen.startswith("the engine died: ")


def test_checks_that_are_cancelled_are_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(_: EngineEvents) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(EngineEvents, "run", cancelled)
    rows = rows_of("agg")
    assert (rows["warm-up"].result, rows["warm-up"].seen) == ("failed", "given up before its end")
    assert {rows[name].result for name in EngineCheck.NAMES[1:]} == {"not run"}
    assert rows["shutdown"].result == "ok"


def raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def test_an_error_of_the_shutdown_is_a_failure() -> None:
    def change(llm: Any) -> None:
        llm.shutdown = raising(RuntimeError("boom"))

    row = rows_of("agg", change=change)["shutdown"]
    assert (row.result, row.seen) == ("failed", "RuntimeError: boom")


def test_a_call_for_the_capacity_that_fails_is_told() -> None:
    def change(llm: Any) -> None:
        llm.get_kv_cache_capacity = raising(RuntimeError("boom"))

    row = rows_of("agg", change=change)["capacity"]
    assert row.result == "failed"
    assert "get_kv_cache_capacity() told nothing" in row.seen
    assert row.advice


def without_context(llm: Any) -> None:
    llm._hf_model_config = SimpleNamespace()
    llm.get_kv_cache_capacity = dict


@pytest.mark.parametrize(
    ("role", "engine", "events"),
    [
        ("agg", {"max_seq_len": 64}, "ok"),
        ("agg", {"max_seq_len": 64, "kv_cache_config": {"tokens_per_block": 128}}, NOT_POSSIBLE),
        ("agg", {"max_seq_len": 1024, "kv_cache_config": {"tokens_per_block": 512}}, "ok"),
        (
            "decode",
            {"max_num_tokens": 64, "max_batch_size": 64, "enable_chunked_prefill": False},
            "ok",
        ),
        (
            "prefill",
            {"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 64}},
            "ok",
        ),
        ("decode", {"extra": "deepseek-r1", "kv_cache_config": {"tokens_per_block": 128}}, "ok"),
    ],
)
def test_requests_fit_small_windows_and_steps(
    role: str, engine: dict[str, Any], events: str
) -> None:
    rows = rows_of(role, **engine)
    assert rows.pop("KV events").result == events
    assert {row.result for row in rows.values()} <= {"ok", "off"}


def test_an_engine_of_unknown_context_aborts_a_request_all_the_same() -> None:
    rows = rows_of("agg", "1.2", change=without_context, enable_iter_perf_stats=False)
    assert "context not known" in rows["capacity"].seen
    assert rows["abort"].result == "ok"


def test_an_abort_is_not_held_up_by_another_request() -> None:
    rows = rows_of("agg", change=with_fault(Fault.HANG, 3))
    assert rows["request"].seen == "DEADLINE_EXCEEDED: deadline exceeded on the worker"
    assert rows["abort"].result == "ok"


def test_an_abort_tells_the_error_of_its_request() -> None:
    rows = rows_of("agg", change=with_fault(Fault.FAIL, 4))
    assert "the request failed" in rows["abort"].seen


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


@pytest.mark.parametrize("role", ["agg", "encode"])
@pytest.mark.parametrize("init", ["", "fail"])
def test_the_constructor_and_the_shutdown_are_rows_too(role: str, init: str) -> None:
    args = build_engine_args(role=role, cli={"model": MODEL}, extra=None, override=None)
    with installed("1.4rc", time_scale=0.0, init=init):
        rows, has_ended = anyio.run(run_self_check, options_of(args))
    assert rows[0].what == "constructor"
    assert rows[-1].what == "shutdown"
    assert has_ended == (not init)
    if init:
        assert (rows[0].result, rows[0].advice != "") == ("failed", True)
        assert "CUDA out of memory" in rows[0].seen
        assert {row.result for row in rows[1:]} == {"not run"}
    else:
        assert {row.result for row in rows} <= {"ok", "off", NOT_POSSIBLE}


def test_what_serving_refuses_is_no_finding_about_the_engine() -> None:
    def change(llm: Any) -> None:
        llm.tokenizer = None

    with pytest.raises(UsageError, match="--end-id is needed"):
        rows_of("agg", change=change)


def test_a_decode_worker_without_a_key_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    rows_of("decode")
    assert [each.msg for each in caplog.records].count("handoff.unsealed") == 1
