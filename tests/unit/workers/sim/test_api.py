"""The TensorRT-LLM double's versions: signatures and shapes that really differ."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import NEWEST, VERSIONS, sim_api
from support.engine.sim_llm import Pair, expected, llm, polled, prompt_of

every_version = pytest.mark.parametrize("api", VERSIONS)

OLD = [
    "inputs",
    "sampling_params",
    "lora_request",
    "prompt_adapter_request",
    "streaming",
    "kv_cache_retention_config",
    "disaggregated_params",
    "trace_headers",
    "_postproc_params",
    "scheduling_params",
]

PARAMETERS = {
    "1.1": [*(name for name in OLD if name != "trace_headers"), "cache_salt"],
    "1.2": [*OLD, "cache_salt"],
    "1.3rc": [*OLD, "cache_salt", "priority"],
    "1.4rc": [*OLD, "conversation_params", "cache_salt", "priority"],
}


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.1, 1\.2, 1\.3rc, 1\.4rc: 2"):
        sim_api("2")


@every_version
def test_a11_generate_async_has_the_parameters_of_its_version_in_order(api: str) -> None:
    parameters = list(inspect.signature(sim_api(api).LLM.generate_async).parameters)
    assert parameters[1:] == PARAMETERS[api]


@pytest.mark.parametrize(
    ("api", "keyword"), [("1.1", "trace_headers"), ("1.2", "priority"),
                         ("1.2", "conversation_params"), ("1.3rc", "conversation_params")]
)  # fmt: skip
def test_a11_a_keyword_that_came_later_is_a_type_error(api: str, keyword: str) -> None:
    async def scenario() -> None:
        with pytest.raises(TypeError, match=keyword):
            llm(api=api).generate_async([1], **{keyword: None})

    run(scenario)


@pytest.mark.parametrize("name", ["_check_health", "get_kv_cache_capacity"])
def test_a11_what_1_1_and_1_2_cannot_be_asked(name: str) -> None:
    assert [hasattr(llm(api=api), name) for api in VERSIONS] == [False, False, True, True]


@pytest.mark.parametrize("name", ["ConversationParams", "PreprocessedInputs"])
def test_a11_what_only_the_newest_exports(name: str) -> None:
    assert [hasattr(sim_api(api), name) for api in VERSIONS] == [False, False, False, True]
    assert [hasattr(llm(api=api), "preprocess") for api in VERSIONS] == [False, False, False, True]
    priorities = [hasattr(sim_api(api), "DEFAULT_REQUEST_PRIORITY") for api in VERSIONS]
    assert priorities == [False, False, True, True]


def test_a11_each_version_of_the_params_has_the_fields_of_the_one_before() -> None:
    oldest, old, middle, new = (
        {field.name for field in fields(sim_api(api).DisaggregatedParams)} for api in VERSIONS
    )
    assert oldest == old
    assert {"request_type", "first_gen_tokens", "ctx_request_id", "opaque_state"} < old
    assert middle - old == {
        "first_gen_log_probs",
        "first_gen_logits",
        "disagg_request_id",
        "ctx_dp_rank",
        "ctx_info_endpoint",
        "schedule_style",
    }
    assert new - middle == {"multimodal_item_runs", "ctx_usage", "conversation_id"}
    assert old < middle < new


@every_version
def test_a11_a_handoff_works_within_every_version(api: str, tmp_path: Any) -> None:
    pair = Pair(tmp_path, api=api)

    async def scenario() -> None:
        params = await pair.hand_off(prompt_of(100))
        result = await pair.resume(prompt_of(100), params, max_tokens=4)
        assert result.outputs[0].token_ids == expected(prompt_of(100), 4)
        assert result.cached_tokens == 100
        await pair.blocks_come_back()

    run(scenario)
    for transport in pair.transports:
        transport.close()


@every_version
def test_a9_without_an_event_buffer_there_is_nothing(api: str) -> None:
    async def scenario() -> None:
        engine = llm(api=api)
        await engine.generate_async(prompt_of(65))
        assert engine.get_kv_cache_events(0) == []

    run(scenario)


@every_version
def test_a9_events_come_nested_from_old_executors_and_with_keys_from_the_newest(api: str) -> None:
    async def scenario() -> None:
        sampling = sim_api(api).SamplingParams(max_tokens=1)
        polls = []
        for is_async in (True, False):
            engine = llm(api=api, kv_cache_config={"event_buffer_max_size": 100})
            await engine.generate_async(prompt_of(65), sampling)
            if is_async:
                polls.append(await polled(engine.get_kv_cache_events_async(timeout=0)))
            else:
                polls.append(engine.get_kv_cache_events(0))
        assert polls[0] == polls[1]
        (got, _) = polls
        if api == "1.1":
            (got,) = got
        assert [event["event_id"] for event in got] == list(range(len(got)))
        assert {event["data"]["type"] for event in got} == {"created", "stored"}
        newest = {"layer_group_id", "hash_algo"}
        assert all(newest <= {*event} for event in got) is (api == NEWEST)
        assert any(newest & {*event} for event in got) is (api == NEWEST)

    run(scenario)


@every_version
def test_a10_stats_of_1_1_and_1_2_lack_the_kv_token_counts(api: str) -> None:
    keys = {"numCtxKvTokens", "numGenKvTokens", "numPausedKvTokens"}

    async def scenario() -> None:
        engine = llm(api=api)
        assert len(engine.get_stats(0)) == (api == "1.4rc")
        await engine.generate_async([1])
        rows = engine.get_stats(0)
        assert rows
        for row in rows:
            assert (keys <= {*row["inflightBatchingStats"]}) is (api not in ("1.1", "1.2"))
        assert engine.get_stats(0) == []

    run(scenario)


@every_version
def test_a10_stats_must_be_switched_on(api: str) -> None:
    async def scenario() -> None:
        engine = llm(api=api, enable_iter_perf_stats=False)
        await engine.generate_async([1])
        assert engine.get_stats(0) == []

    run(scenario)


def test_only_the_newest_says_whether_there_are_events() -> None:
    cache = {"event_buffer_max_size": 100}
    engines = [llm(api=api, kv_cache_config=cache) for api in VERSIONS[-2:]]
    capacities = [engine.get_kv_cache_capacity() for engine in engines]  # type: ignore[attr-defined]
    assert capacities[1].pop("kvEventsEnabled") is True
    assert capacities[0] == capacities[1]
