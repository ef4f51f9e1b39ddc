"""The seal on a handoff: whoever changes anything that decode would use breaks it."""

from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Value
from hypothesis import given, settings
from hypothesis import strategies as st

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import RequestRefused
from slagate.workers.handoff import seal as handoff_seal
from slagate.workers.handoff.seal import (
    ATTRIBUTE,
    canonical,
    check_key,
    check_seal,
    fingerprint,
    mac,
    seal,
)
from support.seeds import n_in

KEY, OTHER_KEY = b"k" * 16, b"o" * 16
N_EXAMPLES = n_in(gate=40, long=200)

json = st.recursive(
    # (-0.0 equals 0.0 and has other bytes.)
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False).map(lambda number: number + 0.0)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def sessions(draw: st.DrawFn) -> oe.KvSessionRef:
    made = oe.KvSessionRef(
        session_id=draw(st.text(max_size=4)),
        transfer_backend=draw(st.text(max_size=4)),
        dp_rank=draw(st.integers(0, 3)),
    )
    for host, port in draw(st.lists(st.tuples(st.text(max_size=3), st.integers(0, 9)), max_size=2)):
        made.endpoints.add(host=host, port=port, protocol=draw(st.text(max_size=2)))
    names = st.text(max_size=3).filter(lambda name: name != ATTRIBUTE)
    made.attributes_struct.update(draw(st.dictionaries(names, json, max_size=3)))
    return made


def sealed(session: oe.KvSessionRef) -> oe.KvSessionRef:
    copy = oe.KvSessionRef()
    copy.CopyFrom(session)
    seal(copy, KEY)
    return copy


def is_refused(session: oe.KvSessionRef, key: bytes = KEY) -> bool:
    try:
        check_seal(session, key)
    except RequestRefused:
        return True
    return False


@settings(max_examples=N_EXAMPLES)
@given(sessions())
def test_a_seal_holds_over_the_wire_and_for_its_key_only(session: oe.KvSessionRef) -> None:
    arrived = oe.KvSessionRef.FromString(sealed(session).SerializeToString())
    assert not is_refused(arrived)
    assert is_refused(arrived, OTHER_KEY)
    assert is_refused(session)


@settings(max_examples=N_EXAMPLES)
@given(sessions(), sessions())
def test_sessions_have_the_same_bytes_only_when_they_are_the_same(
    one: oe.KvSessionRef, other: oe.KvSessionRef
) -> None:
    assert (canonical(one) == canonical(other)) == (one == other)


@settings(max_examples=N_EXAMPLES)
@given(sessions(), st.data())
def test_any_change_breaks_the_seal(session: oe.KvSessionRef, data: st.DataObject) -> None:
    forged = sealed(session)
    before = forged.SerializeToString(deterministic=True)
    what = data.draw(st.sampled_from(["id", "backend", "rank", "endpoint", "attribute", "mac"]))
    if what == "id":
        forged.session_id += "1"
    elif what == "backend":
        forged.transfer_backend += "x"
    elif what == "rank":
        forged.dp_rank += 1
    elif what == "endpoint":
        forged.endpoints.add(host="169.254.169.254", port=80)
    elif what == "attribute":
        forged.attributes_struct[data.draw(st.sampled_from(["opaque_state", "x"]))] = "forged!"
    else:
        given_mac = forged.attributes_struct[ATTRIBUTE]
        forged.attributes_struct[ATTRIBUTE] = data.draw(
            st.sampled_from([given_mac[:-1], given_mac.upper() + "0", "", "\u00e9", 7, None, True])
        )
    assert forged.SerializeToString(deterministic=True) != before
    assert is_refused(forged)


def test_fields_cannot_run_into_each_other() -> None:
    def session(**attributes: Any) -> oe.KvSessionRef:
        made = oe.KvSessionRef(session_id="1")
        made.attributes_struct.update(attributes)
        return made

    texts = [
        session(a="b", c="d"),
        session(a="bc", d=""),
        session(a=["b", "c"]),
        session(a=[["b"], "c"]),
        session(a={"b": "c"}),
        # (A name that is nothing is a name.)
        session(a={}),
        session(a={"": None}),
        session(a="1"),
        session(a=1),
        session(a=True),
        session(a=None),
        oe.KvSessionRef(session_id="1", transfer_backend="2"),
        oe.KvSessionRef(session_id="12"),
    ]
    assert len({canonical(one) for one in texts}) == len(texts)


def test_a_refusal_does_not_quote_the_session() -> None:
    session = oe.KvSessionRef(session_id="7")
    session.attributes_struct.update({"opaque_state": "c2VjcmV0", ATTRIBUTE: "f" * 64})
    with pytest.raises(RequestRefused) as caught:
        check_seal(session, KEY)
    assert caught.value.status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.status.message.startswith(f"kv.session.attributes_struct.{ATTRIBUTE}: ")
    assert "c2VjcmV0" not in caught.value.status.message
    assert mac(session, KEY) not in caught.value.status.message


def test_a_check_leaves_the_session_as_it_is() -> None:
    session = oe.KvSessionRef(session_id="7")
    assert is_refused(session)
    assert ATTRIBUTE not in session.attributes_struct.fields
    session.attributes_struct.fields[ATTRIBUTE].CopyFrom(Value())
    assert is_refused(session)


def test_a_key_too_short_to_be_one_is_refused() -> None:
    with pytest.raises(ValueError, match="16 are needed"):
        check_key(b"short")


def test_a_session_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(session: oe.KvSessionRef, key: bytes) -> str:
        raise AssertionError("the MAC of this costs more than it is worth")

    monkeypatch.setattr(handoff_seal, "mac", unread)
    session = oe.KvSessionRef(session_id="7")
    session.attributes_struct.update({"draft_tokens": [7.0] * 20_000, ATTRIBUTE: "f" * 64})
    with pytest.raises(RequestRefused, match=r"kv\.session: is over"):
        check_seal(session, KEY)


def test_a_fingerprint_tells_keys_apart_and_nothing_else() -> None:
    one, same, other = (fingerprint(key) for key in (b"k" * 16, b"k" * 16, b"x" * 16))
    assert one == same != other
    assert len(one) == 16
    assert int(one, 16) > 0
