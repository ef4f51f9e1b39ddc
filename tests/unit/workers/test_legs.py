import pytest
from hypothesis import given
from hypothesis import strategies as st

from slagate.proto import openengine_pb2 as oe
from slagate.workers.legs import (
    CONTEXT_ONLY,
    REQUEST_TYPE,
    agg_leg,
    client_id_suffix,
    decode_leg,
    prefill_leg,
)
from support.builders import request, session, token

Request = oe.GenerateRequest


def original() -> Request:
    message = request("client", tokens=[1, 2, 3])
    message.stopping.max_tokens = 7
    message.stopping.min_tokens = 3
    message.stopping.conditions.add(stop_token_id=5)
    message.stopping.ignore_eos = True
    message.sampling.temperature = 0.0
    message.kv.cache_salt = "salt"
    message.extra.update({"conversation_id": "c"})
    return message


def test_a_prefill_leg_changes_id_budget_and_type_and_nothing_else() -> None:
    data = original().SerializeToString()
    leg = prefill_leg(data, "leg-1")
    assert leg.startswith(data)
    wanted = original()
    wanted.request_id = "leg-1"
    wanted.stopping.max_tokens = 1
    wanted.stopping.min_tokens = 0
    wanted.extra.update({REQUEST_TYPE: CONTEXT_ONLY})
    assert Request.FromString(leg) == wanted


def test_one_of_the_clients_minimum_falls_to_the_prefill_leg() -> None:
    data = original().SerializeToString()
    for min_tokens, wanted in ((0, 0), (1, 1), (50, 1)):
        leg = Request.FromString(prefill_leg(data, "leg-1", min_tokens=min_tokens))
        assert (leg.stopping.max_tokens, leg.stopping.min_tokens) == (1, wanted)


def test_a_decode_leg_adds_the_session_and_a_budget_only_when_told() -> None:
    data = original().SerializeToString()
    wanted = original()
    wanted.request_id = "leg-2"
    wanted.kv.session.CopyFrom(session("9"))
    assert (
        Request.FromString(decode_leg(data, "leg-2", session=session("9"), max_tokens=None))
        == wanted
    )
    wanted.stopping.max_tokens = 50
    assert (
        Request.FromString(decode_leg(data, "leg-2", session=session("9"), max_tokens=50)) == wanted
    )


def test_an_aggregated_leg_changes_the_id_and_a_budget_only_when_told() -> None:
    data = original().SerializeToString()
    wanted = original()
    wanted.request_id = "leg-3"
    assert Request.FromString(agg_leg(data, "leg-3", max_tokens=None)) == wanted
    wanted.stopping.max_tokens = 50
    assert Request.FromString(agg_leg(data, "leg-3", max_tokens=50)) == wanted
    wanted.extra[REQUEST_TYPE] = "context_and_generation"
    assert Request.FromString(agg_leg(data, "leg-3", max_tokens=50, to_decode=True)) == wanted


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.text(min_size=1, max_size=9)
)
def test_the_prompt_is_never_doubled_or_changed(tokens: list[int], leg_id: str) -> None:
    data = request(tokens=tokens).SerializeToString()
    for leg in (
        prefill_leg(data, leg_id),
        decode_leg(data, leg_id, session=session(), max_tokens=3),
        agg_leg(data, leg_id, max_tokens=3),
    ):
        parsed = Request.FromString(leg)
        assert list(parsed.token_ids.ids) == tokens
        assert parsed.request_id == leg_id


@pytest.mark.parametrize(
    "text", ["", "a", "\u00e9" * 63, "i" * 127, "i" * 128, "\u00e9" * 64, "i" * 1024]
)
def test_an_id_written_by_hand_is_protobufs_own(text: str) -> None:
    assert client_id_suffix(text) == oe.GenerateResponse(request_id=text).SerializeToString()
    added = Request(request_id=text).SerializeToString()
    assert agg_leg(b"data", text, max_tokens=None) == b"data" + added


def test_a_response_gets_the_clients_id_back() -> None:
    message = token(4, 5)
    message.request_id = "gateway-17"
    relayed = oe.GenerateResponse.FromString(
        message.SerializeToString() + client_id_suffix("client")
    )
    message.request_id = "client"
    assert relayed == message
