from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import RequestRefused
from slagate.workers.handoff.codec import (
    LOGPROB_FLOOR,
    MAX_LIST_ENTRIES,
    MAX_OPAQUE_STATE_BYTES,
    MAX_OTHER_BYTES,
    FirstLogprob,
    params_of_session,
    session_of_params,
)


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
    usual = {"opaque_state": "AAAA", "first_gen_tokens": [1]}
    session.attributes_struct.update(usual | attributes)
    return session


def refusal(session: oe.KvSessionRef) -> str:
    with pytest.raises(RequestRefused) as caught:
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
    first_gen_tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
    draft_tokens=st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=3),
    ctx_dp_rank=st.none() | st.integers(0, 7),
    ctx_info_endpoint=st.none() | st.just("10.0.0.1:9"),
    schedule_style=st.none() | st.integers(0, 1),
    first_gen_log_probs=st.none()
    | st.lists(
        st.floats(-50, 0)
        | st.dictionaries(
            st.integers(0, 2**31 - 1),
            st.builds(FirstLogprob, st.floats(-50, 0), st.none() | st.integers(1, 9)),
            max_size=3,
        ),
        max_size=2,
    ),
)
def test_what_prefill_gives_is_what_decode_gets_over_the_wire(**values: Any) -> None:
    sent = session_of_params(engine_params(**values), transfer_backend="nixl")
    got = params_of_session(oe.KvSessionRef.FromString(sent.SerializeToString()))
    assert got.pop("request_type") == "generation_only"
    for name in ("ctx_dp_rank", "schedule_style", "first_gen_log_probs"):
        assert got.pop(name, None) == values.pop(name)
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
    "value", [7, "7", None, {"a": 1}, [-1], [2**31], ["7"], [True], [None], [float("nan")], [1.5]]
)
def test_tokens_that_are_no_token_ids_are_refused(name: str, value: Any) -> None:
    assert f"attributes_struct.{name}" in refusal(session_with(**{name: value}))


@pytest.mark.parametrize("name", ["opaque_state", "disagg_request_id", "ctx_info_endpoint"])
@pytest.mark.parametrize("value", [7, True, None, ["x"], {"a": "x"}])
def test_a_text_of_another_type_is_refused(name: str, value: Any) -> None:
    assert f"attributes_struct.{name}: must be a string" in refusal(session_with(**{name: value}))


def test_the_rank_of_an_engine_that_cannot_say_is_the_one_it_was_told() -> None:
    old = SimpleNamespace(
        ctx_request_id=7, opaque_state=b"s", first_gen_tokens=[1], draft_tokens=None
    )
    session = session_of_params(old, transfer_backend="nixl", rank=3)
    assert (session.dp_rank, session.attributes_struct["ctx_dp_rank"]) == (3, 3)
    assert "ctx_dp_rank" not in session_of_params(old, transfer_backend="nixl").attributes_struct


def test_the_engines_own_word_on_its_rank_wins() -> None:
    session = session_of_params(engine_params(ctx_dp_rank=1), transfer_backend="nixl", rank=0)
    assert (session.dp_rank, session.attributes_struct["ctx_dp_rank"]) == (1, 1)


@pytest.mark.parametrize("value", [2, "1", None, [1], 1.5])
def test_disagg_12_two_ranks_in_one_session_are_refused(value: Any) -> None:
    """DISAGG-12: the rank has two places in a session, and both must say the same."""
    session = session_with(ctx_dp_rank=value)
    session.dp_rank = 1
    assert "attributes_struct.ctx_dp_rank" in refusal(session)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_log_probability_that_is_not_finite_is_clamped(number: float) -> None:
    params = engine_params(first_gen_log_probs=[number, {5: FirstLogprob(number, None)}])
    session = session_of_params(params, transfer_backend="nixl")
    got = params_of_session(session)["first_gen_log_probs"]
    assert got == [LOGPROB_FLOOR, {5: FirstLogprob(LOGPROB_FLOOR, None)}]
    forged = session_with(first_gen_log_probs=[number, [[5, number, 1]]])
    got = params_of_session(forged)["first_gen_log_probs"]
    assert got == [LOGPROB_FLOOR, {5: FirstLogprob(LOGPROB_FLOOR, 1)}]


@pytest.mark.parametrize(
    "value",
    [1, "x", {"a": 1}, ["x"], [None], [[1]], [[[1, -1.0]]], [[[1, "x", 1]]], [[[-1, -1.0, 1]]]],
)
def test_log_probabilities_of_another_shape_are_refused(value: Any) -> None:
    assert "attributes_struct.first_gen_log_probs" in refusal(
        session_with(first_gen_log_probs=value)
    )


def test_w05_a_handoff_without_first_token_is_refused_unless_decode_began_first() -> None:
    for tokens in ({"first_gen_tokens": []}, {}):
        session = session_with()
        session.attributes_struct.fields.pop("first_gen_tokens")
        session.attributes_struct.update(tokens)
        assert "attributes_struct.first_gen_tokens" in refusal(session)
        session.attributes_struct["schedule_style"] = 1
        assert not params_of_session(session)["first_gen_tokens"]


@pytest.mark.parametrize("value", ["0", -1, 0.5, None, [0], 2])
def test_a_schedule_style_that_is_no_number_is_refused(value: Any) -> None:
    assert "attributes_struct.schedule_style" in refusal(session_with(schedule_style=value))


@pytest.mark.parametrize("value", ["three", "0", None, True, [0], {"a": 0}])
def test_disagg_12_a_rank_of_another_kind_is_not_rank_0(value: Any) -> None:
    """DISAGG-12: what is no number reads as 0 where nobody looks at its kind."""
    assert "attributes_struct.ctx_dp_rank" in refusal(session_with(ctx_dp_rank=value))


@pytest.mark.parametrize("name", ["first_gen_tokens", "draft_tokens", "first_gen_log_probs"])
def test_a_list_has_a_limit(name: str) -> None:
    params_of_session(session_with(**{name: [0] * MAX_LIST_ENTRIES}))
    assert f"attributes_struct.{name}" in refusal(
        session_with(**{name: [0] * (MAX_LIST_ENTRIES + 1)})
    )


def test_a_session_has_a_limit_beside_its_state() -> None:
    state = "AAAA" * (MAX_OPAQUE_STATE_BYTES // 4)
    params_of_session(session_with(opaque_state=state, more="x" * (MAX_OTHER_BYTES - 200)))
    assert "kv.session: is over" in refusal(session_with(more="x" * MAX_OTHER_BYTES))
