"""Handoffs that were touched on the way: refused with words, and never a token.

A real prefill worker parks a real prompt; what it hands out is changed and given to a real decode
worker. Nothing but a whole, unused, fitting handoff may give tokens.
"""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Answer, Client, decode_leg, prefill_leg, request
from support.gateway.processes import Cluster, eventually
from support.seeds import is_long_run

PROMPT = prompt(100, seed=21)
OTHER_PROMPT = prompt(100, seed=22)  # as long as the first: only its content differs

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def prefill(disagg: Cluster) -> Iterator[Client]:
    with Client(disagg.addresses("p")[0]) as client:
        yield client


@pytest.fixture(scope="module")
def decode(disagg: Cluster) -> Iterator[Client]:
    with Client(disagg.addresses("d")[0]) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_stays_behind(prefill: Client, decode: Client) -> Iterator[None]:
    """After each attack the decode worker serves, and the prefill worker holds no session."""
    yield
    session = park(prefill, PROMPT)
    good = decode.generate(decode_leg(request(PROMPT, 5, request_id="after"), session))
    assert good.tokens == expected(PROMPT, 5)
    eventually(lambda: prefill.load().active_kv_sessions == 0, "no session is parked")
    eventually(lambda: decode.load().running_requests == 0, "no request runs on decode")


def park(prefill: Client, tokens: list[int]) -> Any:
    answer = prefill.generate(prefill_leg(request(tokens, 5, request_id="park")))
    assert answer.events == ["prefill_ready"]
    assert answer.session is not None
    return answer.session


def attack(prefill: Client, decode: Client, change: Change) -> Answer:
    """Park a prompt, change its handoff, try to decode it; then free it as the gateway would."""
    session = park(prefill, PROMPT)
    changed = type(session)()
    changed.CopyFrom(session)
    change(changed)
    answer = decode.generate(decode_leg(request(PROMPT, 5, request_id="attack"), changed))
    try:
        prefill.control("Abort", kv_session=session)
    except grpc.RpcError as error:
        # A changed handoff may still have led to the parked blocks, which are then used up.
        assert error.code() is grpc.StatusCode.NOT_FOUND  # noqa: PT017
    return answer


def assert_refused(answer: Answer, *, naming: str) -> None:
    assert answer.failed
    assert answer.tokens == []
    assert "token" not in answer.events
    assert "finished" not in answer.events
    assert naming in answer.message
    assert "Traceback" not in answer.message


def state_of(session: Any) -> bytes:
    return base64.b64decode(session.attributes_struct["opaque_state"])


def set_state(session: Any, state: bytes) -> None:
    session.attributes_struct["opaque_state"] = base64.b64encode(state).decode()


def test_the_legs_work_when_nobody_touches_the_handoff(prefill: Client, decode: Client) -> None:
    session = park(prefill, PROMPT)
    answer = decode.generate(decode_leg(request(PROMPT, 30), session))
    assert answer.tokens == expected(PROMPT, 30)
    assert answer.usage.cached_prompt_tokens == len(PROMPT)


def test_a_corrupted_state_is_refused_wherever_the_byte_is(prefill: Client, decode: Client) -> None:
    """Every byte is checked by something: none may be changed without a refusal.

    In the gate it is each eighth one: tests/contract has them all, of the transport's part. The first four
    tell the double that it is a state at all. An engine does not survive one that is none, so a worker with
    a key reads none that its prefill workers have not sealed: see tests/e2e/test_trtllm_worker.py.
    """
    session = park(prefill, PROMPT)
    prefill.control("Abort", kv_session=session)
    places = range(4, len(state_of(session)), 1 if is_long_run() else 8)
    before = decode.load_attribute("kv_transfer_failures")
    for at in places:

        def flip(session: Any, at: int = at) -> None:
            state = bytearray(state_of(session))
            state[at] ^= 0x41
            set_state(session, bytes(state))

        assert_refused(attack(prefill, decode, flip), naming="KV transfer failed")
    assert decode.load_attribute("kv_transfer_failures") == before + len(places)


@pytest.mark.parametrize("kept", [60, -1])
def test_a_truncated_state_is_refused(prefill: Client, decode: Client, kept: int) -> None:
    answer = attack(prefill, decode, lambda session: set_state(session, state_of(session)[:kept]))
    assert_refused(answer, naming="KV transfer failed")


def test_bytes_behind_the_state_are_refused(prefill: Client, decode: Client) -> None:
    answer = attack(prefill, decode, lambda session: set_state(session, state_of(session) + b"\0"))
    assert_refused(answer, naming="KV transfer failed")


@pytest.mark.parametrize("text", ["", "not base64!", "AAA", "A" * 1_500_000])
def test_a_state_that_is_no_state_is_refused_by_name(
    prefill: Client, decode: Client, text: str
) -> None:
    def replace(session: Any) -> None:
        session.attributes_struct["opaque_state"] = text

    before = decode.load_attribute("kv_transfer_failures")
    answer = attack(prefill, decode, replace)
    assert_refused(answer, naming="kv.session.attributes_struct.opaque_state")
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert decode.load_attribute("kv_transfer_failures") == before


def test_a_handoff_works_once(prefill: Client, decode: Client) -> None:
    session = park(prefill, PROMPT)
    first = decode.generate(decode_leg(request(PROMPT, 5, request_id="once"), session))
    assert first.tokens == expected(PROMPT, 5)
    second = decode.generate(decode_leg(request(PROMPT, 5, request_id="twice"), session))
    assert_refused(second, naming="already consumed or released")


def test_a_released_handoff_does_not_work(prefill: Client, decode: Client) -> None:
    session = park(prefill, PROMPT)
    prefill.control("Abort", kv_session=session)
    answer = decode.generate(decode_leg(request(PROMPT, 5, request_id="late"), session))
    assert_refused(answer, naming="already consumed or released")


def test_handoffs_of_two_prompts_cannot_be_swapped(prefill: Client, decode: Client) -> None:
    """Each is refused before its blocks are asked for, so that the right one of the two still works."""
    before = decode.load_attribute("kv_verify_failures")
    prompts = (PROMPT, OTHER_PROMPT)
    sessions = [park(prefill, tokens) for tokens in prompts]
    for tokens, session in zip(reversed(prompts), sessions, strict=True):
        answer = decode.generate(decode_leg(request(tokens, 5, request_id="swap"), session))
        assert_refused(answer, naming="of another prompt")
    assert decode.load_attribute("kv_verify_failures") == before
    for tokens, session in zip(prompts, sessions, strict=True):
        answer = decode.generate(decode_leg(request(tokens, 5, request_id="right"), session))
        assert answer.tokens == expected(tokens, 5)


def test_a_handoff_of_another_length_is_refused(prefill: Client, decode: Client) -> None:
    session = park(prefill, PROMPT)
    answer = decode.generate(decode_leg(request(PROMPT[:-1], 5, request_id="short"), session))
    prefill.control("Abort", kv_session=session)
    assert_refused(answer, naming="100 prompt tokens, not 99")


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], ["x"], [-1], [1.5], "12", None], ids=repr)
def test_other_first_tokens_are_refused(prefill: Client, decode: Client, tokens: Any) -> None:
    def replace(session: Any) -> None:
        session.attributes_struct["first_gen_tokens"] = tokens

    assert_refused(attack(prefill, decode, replace), naming="first_gen_tokens")


def test_a_first_token_that_is_no_whole_number_is_refused(prefill: Client, decode: Client) -> None:
    """A fraction must not be cut to the right token."""

    def add_half(session: Any) -> None:
        right = session.attributes_struct["first_gen_tokens"][0]
        session.attributes_struct["first_gen_tokens"] = [right + 0.5]

    assert_refused(attack(prefill, decode, add_half), naming="first_gen_tokens")


def test_missing_first_tokens_are_refused(prefill: Client, decode: Client) -> None:
    answer = attack(
        prefill, decode, lambda session: session.attributes_struct.fields.pop("first_gen_tokens")
    )
    assert_refused(answer, naming="first_gen_tokens")


@pytest.mark.parametrize("session_id", ["abc", "-1", "1.0", " 1", "\u0661", "9" * 21])
def test_a_session_id_that_is_no_id_is_refused_by_name(
    prefill: Client, decode: Client, session_id: str
) -> None:
    def replace(session: Any) -> None:
        session.session_id = session_id

    answer = attack(prefill, decode, replace)
    assert_refused(answer, naming="kv.session.session_id")
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT


def test_another_session_id_is_refused(prefill: Client, decode: Client) -> None:
    def replace(session: Any) -> None:
        session.session_id = str(int(session.session_id) + 1)

    assert_refused(attack(prefill, decode, replace), naming="session")


def test_a_handoff_without_any_id_is_refused(prefill: Client, decode: Client) -> None:
    def strip(session: Any) -> None:
        session.session_id = ""
        session.attributes_struct.fields.pop("disagg_request_id")

    answer = attack(prefill, decode, strip)
    assert_refused(answer, naming="kv.session")
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_handoff_without_state_is_refused(prefill: Client, decode: Client) -> None:
    answer = attack(
        prefill, decode, lambda session: session.attributes_struct.fields.pop("opaque_state")
    )
    assert_refused(answer, naming="kv.session")


def test_a_decode_worker_takes_no_request_without_a_handoff(decode: Client) -> None:
    answer = decode.generate(request(PROMPT, 5))
    assert_refused(answer, naming="role mismatch")
    assert answer.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_prefill_worker_takes_no_whole_request(prefill: Client) -> None:
    answer = prefill.generate(request(PROMPT, 5))
    assert_refused(answer, naming="role mismatch")
    assert answer.code is grpc.StatusCode.FAILED_PRECONDITION
