"""gRPC's formats: cut at every byte, with every limit, and the other way round."""

import gzip
import math
import zlib
from itertools import pairwise

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slagate.proto.rpc.frames import MessageReader, WireError, prefix, supported_encoding
from slagate.proto.rpc.headers import (
    decode_message,
    decode_timeout,
    encode_message,
    encode_timeout,
    refused_by_http,
    status_headers,
    status_of_headers,
    status_of_reset,
    to_headers,
    to_metadata,
)
from slagate.proto.rpc.status import Status

LIMIT = 1000


def framed(*messages: bytes) -> bytes:
    return b"".join(prefix(message) + message for message in messages)


def squeezed(message: bytes) -> bytes:
    data = gzip.compress(message)
    return b"\1" + len(data).to_bytes(4, "big") + data


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_messages_are_the_same_wherever_the_bytes_are_cut(
    messages: list[bytes], data: st.DataObject
) -> None:
    stream = framed(*messages)
    places = st.lists(st.integers(0, len(stream)), max_size=8).map(sorted)
    cuts = [0, *data.draw(places), len(stream)]
    reader = MessageReader(LIMIT)
    found: list[bytes] = []
    for start, end in pairwise(cuts):
        found += reader.feed(stream[start:end])
    assert found == messages
    assert reader.waiting_bytes == 0


def test_messages_are_the_same_byte_by_byte_and_never_early() -> None:
    messages = [b"", b"a" * 300, b"b", b"", b"c" * LIMIT]
    reader = MessageReader(LIMIT)
    found: list[bytes] = []
    for at, byte in enumerate(stream := framed(*messages)):
        found += reader.feed(bytes((byte,)))
        assert framed(*found) == stream[: len(framed(*found))]
        assert len(framed(*found)) + reader.waiting_bytes == at + 1
    assert found == messages


def test_a_message_over_the_limit_is_refused_by_its_length_alone() -> None:
    with pytest.raises(WireError) as raised:
        MessageReader(LIMIT).feed(b"\0" + (LIMIT + 1).to_bytes(4, "big"))
    assert raised.value.status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert MessageReader(LIMIT).feed(framed(bytes(LIMIT))) == [bytes(LIMIT)]


def test_compressed_and_plain_messages_may_alternate() -> None:
    reader = MessageReader(LIMIT, encoding=b"gzip")
    data = squeezed(b"a" * 500) + framed(b"plain") + squeezed(b"")
    assert reader.feed(data) == [b"a" * 500, b"plain", b""]
    deflated = zlib.compress(b"abc")
    deflate = MessageReader(LIMIT, encoding=b"deflate")
    assert deflate.feed(b"\1" + len(deflated).to_bytes(4, "big") + deflated) == [b"abc"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (squeezed(bytes(10_000_000)), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (squeezed(bytes(LIMIT + 1)), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\1\0\0\0\3abc", grpc.StatusCode.INTERNAL),
        (b"\1\0\0\0\0", grpc.StatusCode.INTERNAL),
        (b"\1" + (10).to_bytes(4, "big") + gzip.compress(b"abc")[:10], grpc.StatusCode.INTERNAL),
        (framed(gzip.compress(b"abc") + b"d").replace(b"\0", b"\1", 1), grpc.StatusCode.INTERNAL),
    ],
    ids=["bomb", "one too many", "no gzip", "empty", "cut off", "goes on"],
)
def test_a_bad_compressed_message_is_refused(data: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(WireError) as raised:
        MessageReader(LIMIT + (code is grpc.StatusCode.INTERNAL), encoding=b"gzip").feed(data)
    assert raised.value.status.code is code


@pytest.mark.parametrize(
    "bad", [b"\1\0\0\0\3abc", b"\0" + (LIMIT + 1).to_bytes(4, "big")], ids=["no gzip", "too long"]
)
@pytest.mark.parametrize("n_first", [0, 3, 9])
def test_whole_messages_in_front_of_a_bad_one_are_not_lost(bad: bytes, n_first: int) -> None:
    """However much of them came before: none, a part of the first, or one and a part of the next."""
    reader, data = MessageReader(LIMIT, encoding=b"gzip"), framed(b"a", b"bc") + bad
    found = reader.feed(data[:n_first])
    with pytest.raises(WireError) as raised:
        reader.feed(data[n_first:])
    assert found + raised.value.whole == [b"a", b"bc"]


def test_a_compressed_message_needs_an_encoding() -> None:
    with pytest.raises(WireError, match="without an encoding"):
        MessageReader(LIMIT).feed(squeezed(b"a"))
    with pytest.raises(WireError, match="snappy") as raised:
        supported_encoding([(b"grpc-encoding", b"snappy")])
    assert raised.value.status.code is grpc.StatusCode.UNIMPLEMENTED


@given(st.floats(1e-6, 1e9))
def test_a_timeout_is_read_as_at_least_what_was_written_and_hardly_more(timeout_s: float) -> None:
    value = encode_timeout(timeout_s)
    assert len(value) <= 9
    read_s = decode_timeout(value)
    if timeout_s <= 99_999_999:
        assert read_s >= timeout_s * (1 - 1e-9)
        assert read_s <= max(timeout_s * 1.0002, timeout_s + 2e-6)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"3S", 3),
        (b"40m", 0.04),
        (b"5u", 5e-6),
        (b"6n", 6e-9),
        (b"0n", 0),
    ],
)
def test_every_unit_of_a_timeout_is_read(value: bytes, seconds: float) -> None:
    assert math.isclose(decode_timeout(value), seconds)


@pytest.mark.parametrize(
    "value", [b"", b"1", b"S", b"-1S", b"1.5S", b"123456789S", b"1s", b"1SS", b" 1S"]
)
def test_another_timeout_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="grpc-timeout"):
        decode_timeout(value)


@given(st.text())
def test_a_message_survives_its_encoding(text: str) -> None:
    encoded = encode_message(text)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert decode_message(encoded) == text.encode(errors="replace").decode()


@given(st.binary(max_size=60))
def test_any_message_can_be_decoded(raw: bytes) -> None:
    decode_message(raw)


keys = st.from_regex(r"[0-9a-z_.-]{1,10}", fullmatch=True).filter(
    lambda key: not key.endswith("-bin") and key not in ("te", "content-type")
)
texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map(str.strip)
pairs = st.one_of(
    st.tuples(keys, texts), st.tuples(keys.map(lambda key: key + "-bin"), st.binary(max_size=20))
)


@given(st.lists(pairs, max_size=5))
def test_metadata_survives_its_headers(metadata: list[tuple[str, str | bytes]]) -> None:
    assert list(to_metadata(to_headers(metadata))) == metadata


def test_binary_metadata_is_read_padded_unpadded_and_joined() -> None:
    assert to_metadata([(b"a-bin", b"AAE=,AAE, AAEC")]) == (
        ("a-bin", b"\0\1"),
        ("a-bin", b"\0\1"),
        ("a-bin", b"\0\1\2"),
    )
    with pytest.raises(WireError, match="a-bin"):
        to_metadata([(b"a-bin", b"?")])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("A", "b"),
        ("", "b"),
        ("a b", "b"),
        (":path", "b"),
        ("grpc-timeout", "1S"),
        ("a", "b\r\nc: d"),
        ("a", "é"),
    ],
)
def test_metadata_that_is_none_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ValueError, match="metadata"):
        to_headers([(key, value)])


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_a_status_survives_its_trailers(code: grpc.StatusCode) -> None:
    status = Status(code, "50 % \n é", (("x-a", "b"), ("x-bin", b"\0\1")))
    assert status_of_headers(status_headers(status)) == status


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"99", grpc.StatusCode.UNKNOWN),
        (b"12345678901", grpc.StatusCode.INTERNAL),
        (b"x", grpc.StatusCode.INTERNAL),
        (b"", grpc.StatusCode.INTERNAL),
        (b"-1", grpc.StatusCode.INTERNAL),
    ],
)
def test_a_status_that_nobody_knows_is_none(value: bytes, code: grpc.StatusCode) -> None:
    assert status_of_headers([(b"grpc-status", value)]).code is code


def test_no_status_is_internal() -> None:
    assert status_of_headers([]).code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("http", "code"),
    [
        (b"400", grpc.StatusCode.INTERNAL),
        (b"401", grpc.StatusCode.UNAUTHENTICATED),
        (b"403", grpc.StatusCode.PERMISSION_DENIED),
        (b"404", grpc.StatusCode.UNIMPLEMENTED),
        (b"429", grpc.StatusCode.UNAVAILABLE),
        (b"503", grpc.StatusCode.UNAVAILABLE),
        (b"500", grpc.StatusCode.UNKNOWN),
        (b"", grpc.StatusCode.UNKNOWN),
    ],
)
def test_an_answer_of_something_else_than_grpc_has_the_code_of_its_http_status(
    http: bytes, code: grpc.StatusCode
) -> None:
    refusal = refused_by_http([(b":status", http)])
    assert refusal is not None
    assert refusal.code is code


def test_an_answer_is_grpc_by_its_content_type_or_its_status() -> None:
    ok = (b":status", b"200")
    assert refused_by_http([ok, (b"content-type", b"application/grpc+proto")]) is None
    assert refused_by_http([(b":status", b"503"), (b"grpc-status", b"14")]) is None
    for kind in ("text/html", "application/grpcfoo", "application/grpc-web"):
        refusal = refused_by_http([ok, (b"content-type", kind.encode())])
        assert refusal is not None
        assert kind in refusal.message


@pytest.mark.parametrize(
    ("reset", "code"),
    [
        (0x0, grpc.StatusCode.INTERNAL),
        (0x7, grpc.StatusCode.UNAVAILABLE),
        (0x8, grpc.StatusCode.CANCELLED),
        (0xB, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (0xC, grpc.StatusCode.PERMISSION_DENIED),
        (0xFFFF, grpc.StatusCode.INTERNAL),
    ],
)
def test_a_reset_has_the_status_that_grpc_gives_it(reset: int, code: grpc.StatusCode) -> None:
    assert status_of_reset(reset, "r") == Status(code, "r")
