from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slagate.proto import openengine_pb2 as oe
from slagate.workers.codec import MAX_OPAQUE_STATE_BYTES, params_of_session, session_of_params
from slagate.workers.errors import Refused


def engine_params(**changes: Any) -> SimpleNamespace:
    """The engine's `DisaggregatedParams` behind a context-only request."""
    values: dict[str, Any] = {
        "ctx_request_id": 77,
        "disagg_request_id": 2**60 + 1,
        "opaque_state": b"\x00\xffstate",
        "first_gen_tokens": [11],
        "draft_tokens": None,
        "ctx_dp_rank": None,
        "ctx_info_endpoint": None,
    }
    return SimpleNamespace(**values | changes)


def session_with(session_id: str = "77", **attributes: Any) -> oe.KvSessionRef:
    session = oe.KvSessionRef(session_id=session_id)
    session.attributes_struct.update({"opaque_state": "AAAA"} | attributes)
    return session


def refusal(session: oe.KvSessionRef) -> str:
    with pytest.raises(Refused) as caught:
        params_of_session(session)
    assert caught.value.status.code is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.status.message


def test_the_layout_is_that_of_tensorrt_llm() -> None:
    session = session_of_params(engine_params(ctx_dp_rank=0), transfer_backend="nixl")
    assert (session.session_id, session.transfer_backend, session.dp_rank) == ("77", "nixl", 0)
    assert dict(session.attributes_struct.items()) == {
        "opaque_state": "AP9zdGF0ZQ==",
        "first_gen_tokens": [11.0],
        "disagg_request_id": "1152921504606846977",
        "ctx_dp_rank": 0.0,
    }


@given(
    ctx_request_id=st.integers(0, 2**64 - 1),
    disagg_request_id=st.none() | st.integers(0, 2**63 - 1),
    opaque_state=st.binary(min_size=1, max_size=50),
    first_gen_tokens=st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=3),
    draft_tokens=st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=3),
    ctx_dp_rank=st.none() | st.integers(0, 7),
    ctx_info_endpoint=st.none() | st.just("10.0.0.1:9"),
)
def test_what_prefill_gives_is_what_decode_gets_over_the_wire(**values: Any) -> None:
    sent = session_of_params(engine_params(**values), transfer_backend="nixl")
    got = params_of_session(oe.KvSessionRef.FromString(sent.SerializeToString()))
    assert got.pop("request_type") == "generation_only"
    assert got.pop("ctx_dp_rank", None) == values.pop("ctx_dp_rank")
    assert got == values


def test_a_session_without_id_or_without_state_is_refused() -> None:
    assert "neither a session_id nor" in refusal(session_with(""))
    assert "neither an opaque_state nor" in refusal(oe.KvSessionRef(session_id="77"))
    assert "kv.session" in refusal(oe.KvSessionRef())


@pytest.mark.parametrize(
    "text",
    ["-1", "+1", "1_0", " 1", "0x10", "1.0", "\u0661", "abc", "9" * 21, str(2**64)],
)
def test_an_id_that_is_no_64_bit_decimal_is_refused(text: str) -> None:
    assert "kv.session.session_id" in refusal(session_with(text))
    assert "disagg_request_id" in refusal(session_with(disagg_request_id=text))


@pytest.mark.parametrize("text", ["", "A", "AAA", "A===", "AA AA", "_-8=", "\u00e9AAA", "AAAA\n"])
def test_a_state_that_is_no_base64_is_refused(text: str) -> None:
    assert "kv.session.attributes_struct.opaque_state" in refusal(session_with(opaque_state=text))


def test_a_state_over_the_limit_is_refused() -> None:
    text = "AAAA" * (MAX_OPAQUE_STATE_BYTES // 3 + 10)
    assert "over the limit" in refusal(session_with(opaque_state=text))


@pytest.mark.parametrize("name", ["first_gen_tokens", "draft_tokens"])
@pytest.mark.parametrize(
    "value", [7, "7", None, {"a": 1}, [-1], [2**32], ["7"], [True], [None], [float("nan")], [1.5]]
)
def test_tokens_that_are_no_token_ids_are_refused(name: str, value: Any) -> None:
    assert f"attributes_struct.{name}" in refusal(session_with(**{name: value}))


@pytest.mark.parametrize("name", ["opaque_state", "disagg_request_id", "ctx_info_endpoint"])
@pytest.mark.parametrize("value", [7, True, None, ["x"], {"a": "x"}])
def test_a_text_of_another_type_is_refused(name: str, value: Any) -> None:
    assert f"attributes_struct.{name}: must be a string" in refusal(session_with(**{name: value}))
