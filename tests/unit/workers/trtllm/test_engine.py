"""What an installed engine takes, and which of its errors are whose."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from slagate.workers.errors import RequestRefused
from slagate.workers.sim.api import VERSIONS, sim_api
from slagate.workers.sim.request import RequestError
from slagate.workers.trtllm.engine import (
    HANDOFF_LIMIT_S,
    Engine,
    EngineGoneError,
    KvCapacity,
    ask_kv_capacity,
)

Code = grpc.StatusCode


@dataclass(kw_only=True)
class OldParams:
    request_type: str
    ctx_request_id: int | None = None


def engine(generate_async: Callable[..., Any], **args: Any) -> Engine:
    settings: dict[str, Any] = {
        "tensor_parallel_size": 4,
        "kv_cache_config": SimpleNamespace(tokens_per_block=32),
    }
    llm = SimpleNamespace(
        args=SimpleNamespace(**settings | args), tokenizer=None, generate_async=generate_async
    )
    api = SimpleNamespace(DisaggregatedParams=OldParams, RequestError=RequestError)
    return Engine(llm, api)


def test_only_what_the_version_takes_is_passed() -> None:
    def generate_async(inputs: Any, sampling_params: Any = None, streaming: bool = False) -> Any:  # noqa: FBT001, FBT002
        return inputs, sampling_params, streaming

    old = engine(generate_async)
    given = old.submit([1], sampling_params="s", streaming=True, trace_headers={}, cache_salt=None)
    assert given == ([1], "s", True)
    assert old.takes("streaming")
    assert not old.takes("priority")
    assert engine(lambda inputs, **_: None).takes("priority")


def test_params_of_later_versions_are_dropped() -> None:
    made = engine(lambda inputs: None).disaggregated(
        request_type="generation_only", ctx_request_id=7, disagg_request_id=8, ctx_dp_rank=1
    )
    assert made == OldParams(request_type="generation_only", ctx_request_id=7)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad"), Code.INVALID_ARGUMENT),
        (NotImplementedError("bad"), Code.INVALID_ARGUMENT),
        (RequestError("bad"), Code.INVALID_ARGUMENT),
        (TypeError("bad"), Code.INVALID_ARGUMENT),
        (RuntimeError("bad"), Code.UNAVAILABLE),
        (KeyError("bad"), Code.UNAVAILABLE),
    ],
)
def test_an_error_at_submit_is_the_requests_or_the_end(
    error: Exception, code: grpc.StatusCode
) -> None:
    def generate_async(inputs: Any) -> None:
        raise error

    with pytest.raises(RequestRefused) as caught:
        engine(generate_async).submit([1])
    assert caught.value.status.code is code
    assert "bad" in caught.value.status.message
    assert isinstance(caught.value, EngineGoneError) == (code is Code.UNAVAILABLE)


def test_a_call_that_does_not_fit_the_signature_is_a_bug_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def generate_async(inputs: Any, *, priority: float) -> None:
        raise AssertionError("is not reached")

    with pytest.raises(RequestRefused) as caught:
        engine(generate_async).submit([1])
    assert caught.value.status.code is Code.INTERNAL
    assert not isinstance(caught.value, EngineGoneError)
    assert [record.message for record in caplog.records] == ["engine.signature"]


def test_attention_dp_makes_ranks_of_the_tensor_parallel_ones() -> None:
    assert engine(lambda inputs: None).n_ranks == 1
    assert engine(lambda inputs: None, enable_attention_dp=True).n_ranks == 4


@pytest.mark.parametrize("as_type", [dict, lambda **given: SimpleNamespace(**given)])
def test_a_nested_configuration_may_be_an_object_or_a_dict(as_type: Callable[..., Any]) -> None:
    config = as_type(max_tokens_in_buffer=100, kv_transfer_timeout_ms=1500)
    made = engine(lambda inputs: None, cache_transceiver_config=config)
    assert (made.max_transfer_tokens, made.handoff_limit_s) == (100, 1.5)
    bare = engine(lambda inputs: None)
    assert (bare.max_transfer_tokens, bare.handoff_limit_s) == (None, HANDOFF_LIMIT_S)


@pytest.mark.parametrize(
    "config",
    [
        {"backend": "UCX", "max_tokens_in_buffer": 0},
        {"backend": "NIXL", "transceiver_runtime": "PYTHON", "max_tokens_in_buffer": 100},
    ],
)
def test_a_buffer_that_bounds_no_prompt_refuses_none(config: dict[str, Any]) -> None:
    """0 is a buffer for each prompt, and the transceiver in Python has none."""
    made = engine(lambda inputs: None, cache_transceiver_config=config)
    assert made.max_transfer_tokens is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "event_buffer_max_size"),
        ({"event_buffer_max_size": 9, "enable_block_reuse": False}, "enable_block_reuse"),
        ({"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}, "publisher"),
        ({"kv_events_config": {"enable_kv_cache_events": True}}, ""),
        ({"event_buffer_max_size": 9, "kv_events_config": None}, ""),
    ],
)
def test_engine_10_what_keeps_events_off_has_a_name(config: dict[str, Any], named: str) -> None:
    """ENGINE-10."""
    cache = SimpleNamespace(tokens_per_block=32, **config)
    why = engine(lambda inputs: None, kv_cache_config=cache).events_off()
    assert named in why
    assert bool(named) == bool(why)


SAY_V1 = "kv_cache_config.use_kv_cache_manager_v2: false"


@pytest.mark.parametrize(
    ("config", "levels"),
    [
        ({}, (0, 1, 2)),
        ({"host_cache_size": 9, "disk_cache_size": 9}, (0, 1, 2)),
        ({"host_cache_size": None, "disk_cache_size": 9}, (0, 1, 2)),
        ({"host_cache_size": 0, "disk_cache_size": 9}, (0, 2)),
        ({"host_cache_size": 0, "disk_cache_size": None}, (0, 1, 2)),
    ],
)
def test_t2_6_an_engine_numbers_the_levels_that_it_has(
    config: dict[str, Any], levels: tuple[int, ...]
) -> None:
    cache = SimpleNamespace(tokens_per_block=32, **config)
    assert engine(lambda inputs: None, kv_cache_config=cache).cache_levels == levels


def takes_salts(inputs: Any, *, cache_salt: Any = None) -> None: ...
def says_salts(inputs: Any, *, cache_salt: Any = None, conversation_params: Any = None) -> None: ...
def takes_anything(inputs: Any, **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("generate_async", "config", "wanted"),
    [
        (lambda inputs: None, {}, "keep prefixes apart"),
        (takes_salts, {}, ""),
        (takes_salts, {"event_buffer_max_size": 9}, "events"),
        (takes_anything, {"event_buffer_max_size": 9}, "events"),
        (says_salts, {"event_buffer_max_size": 9}, ""),
        (says_salts, {"event_buffer_max_size": 9, "use_kv_cache_manager_v2": False}, ""),
        (says_salts, {"event_buffer_max_size": 9, "use_kv_cache_manager_v2": True}, SAY_V1),
        (says_salts, {"event_buffer_max_size": 9, "use_kv_cache_manager_v2": "auto"}, SAY_V1),
        (says_salts, {"kv_events_config": {"enable_kv_cache_events": True}}, SAY_V1),
    ],
)
def test_w11_salts_need_an_engine_whose_events_say_them_or_that_has_none(
    generate_async: Callable[..., Any], config: dict[str, Any], wanted: str
) -> None:
    cache = SimpleNamespace(tokens_per_block=32, **config)
    why_not = engine(generate_async, kv_cache_config=cache).salts_off()
    assert (wanted in why_not) if wanted else why_not == ""


def model(**settings: Any) -> SimpleNamespace:
    """An engine's `LLM` that knows its model's configuration, and got no `max_seq_len`."""
    return SimpleNamespace(
        args=SimpleNamespace(max_seq_len=None, model="name/of-the-hub"),
        tokenizer=None,
        generate_async=lambda inputs: None,
        _hf_model_config=SimpleNamespace(**settings),
    )


def window(llm: Any, capacity: KvCapacity | None = None) -> int | None:
    api = SimpleNamespace(DisaggregatedParams=OldParams, RequestError=RequestError)
    return Engine(llm, api, capacity=capacity).window_tokens


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": SimpleNamespace(max_position_embeddings=2048)}, 2048),
        ({"text_config": {"max_position_embeddings": 2048}}, 2048),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2.5}}, 250),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, 100),
    ],
)
def test_w01_without_max_seq_len_the_window_is_the_models(
    settings: dict[str, Any], tokens: int | None
) -> None:
    llm = model(**settings)
    assert window(llm) == tokens
    assert window(llm, KvCapacity(4, 128)) == min(tokens or 128, 128)
    llm.args.max_seq_len = 64
    assert window(llm) == 64


def test_w01_a_local_folder_has_the_models_configuration(tmp_path: Path) -> None:
    llm = model()
    llm._hf_model_config = None
    llm.args.model = str(tmp_path)
    assert window(llm) is None
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 300}}')
    assert window(llm) == 300
    (tmp_path / "config.json").write_text("no JSON")
    assert window(llm) is None


def test_w01_an_engine_that_says_nothing_of_itself_is_served_with_defaults() -> None:
    llm = SimpleNamespace(
        args=SimpleNamespace(), tokenizer=None, generate_async=lambda inputs: None
    )
    api = SimpleNamespace(DisaggregatedParams=OldParams, RequestError=RequestError)
    bare = Engine(llm, api)
    assert (bare.n_ranks, bare.block_tokens, bare.window_tokens) == (1, 32, None)
    assert (bare.max_batch_size, bare.max_num_tokens, bare.max_prompt_tokens) == (None, None, None)
    assert bare.events_off()
    bare.learn_blocks({0: {"kvCacheStats": {"maxNumBlocks": 10}}})
    assert bare.known_blocks == 10
    assert bare.window_tokens == 320


@pytest.mark.parametrize("api", VERSIONS)
def test_t2_6_whether_a_host_breaks_events_is_found_out_from_the_serializer(api: str) -> None:
    cache = {"tokens_per_block": 32, "event_buffer_max_size": 9, "host_cache_size": 1}

    def loses(**config: Any) -> bool:
        made = engine(lambda inputs: None, kv_cache_config=SimpleNamespace(**cache | config))
        made.api = sim_api(api)
        return made.loses_events()

    assert loses() == (api in ("1.1", "1.2"))
    assert not loses(host_cache_size=None)
    assert not loses(event_buffer_max_size=0)
    # Without a serializer to ask, nothing is claimed.
    made = engine(lambda inputs: None, kv_cache_config=SimpleNamespace(**cache))
    assert not made.loses_events()


def test_w12_a_window_is_not_learnt_from_blocks_on_the_host() -> None:
    """Of an early version's figures only the free blocks are the GPU's, never more than it has."""
    cache = SimpleNamespace(tokens_per_block=32, host_cache_size=1 << 30)
    made = engine(lambda inputs: None, kv_cache_config=cache, max_seq_len=100_000)

    def learn(n_free: int) -> tuple[int | None, int | None]:
        stats = {"maxNumBlocks": 160, "freeNumBlocks": n_free, "usedNumBlocks": 160 - n_free}
        made.learn_blocks({0: {"kvCacheStats": stats}})
        return made.known_blocks, made.window_tokens

    assert [learn(n_free) for n_free in (99, 3, 100, 0)] == [
        (99, 99 * 32), (99, 99 * 32), (100, 3200), (100, 3200),
    ]  # fmt: skip
    window = {"32768": {"primaryMaxNumBlocks": 100, "primaryUsedNumBlocks": 3}}
    made.learn_blocks({0: {"kvCacheStats": None, "kvCacheIterationStats": window}})
    assert made.window_tokens == 3200


@pytest.mark.parametrize("answer", [{}, {"maxNumBlocks": 0, "maxNumTokens": 0}, None, OSError("x")])
def test_w01_a_capacity_that_cannot_be_told_is_unknown(answer: Any) -> None:
    def ask() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert ask_kv_capacity(SimpleNamespace(get_kv_cache_capacity=ask)) is None
    assert ask_kv_capacity(SimpleNamespace()) is None
