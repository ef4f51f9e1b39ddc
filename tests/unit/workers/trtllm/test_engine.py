"""What an installed engine takes, and which of its errors are whose."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from slagate.workers.errors import RequestRefused
from slagate.workers.sim.request import RequestError
from slagate.workers.trtllm.engine import HANDOFF_LIMIT_S, Engine, EngineGoneError

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
