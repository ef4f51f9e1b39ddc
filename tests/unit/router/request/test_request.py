import math
import struct

import grpc
import pytest

from slagate.pools.prefix.overlap import Prompt
from slagate.pools.prefix.trie import Root
from slagate.proto import openengine_pb2 as oe
from slagate.router.request.errors import InvalidRequest, Outcome, TooLarge, Unsupported
from slagate.router.request.request import (
    DEFAULT_MAX_TOKENS,
    MAX_ID_BYTES,
    Request,
    output_budget,
    parse_request,
)
from slagate.workers.sampling_limits import MAX_STOP_CONDITIONS
from support.builders import model_info, request, session

LIMIT = 8 << 20


def parse(message: oe.GenerateRequest, *, max_bytes: int = LIMIT) -> Request:
    return parse_request(message.SerializeToString(), max_bytes=max_bytes)


def refused(message: oe.GenerateRequest, *, max_bytes: int = LIMIT) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(message, max_bytes=max_bytes)
    error = caught.value
    assert str(error).startswith(f"{error.field}: ")
    return error


def test_a_valid_request_keeps_its_bytes() -> None:
    message = request("id", tokens=[5, 6])
    message.stopping.max_tokens = 9
    message.stopping.min_tokens = 4
    parsed = parse(message)
    prompt = Prompt(struct.pack("<2I", 5, 6))
    assert parsed == Request(message.SerializeToString(), "id", "llama", 2, 9, 4, prompt)
    parsed = parse(request())
    assert (parsed.max_tokens, parsed.min_tokens) == (None, 0)


def test_a_prompt_is_of_its_adapter_and_salt_and_of_no_cache_where_nobody_can_tell() -> None:
    message = request(tokens=[1, 2**32 - 1])
    message.lora_name = "style-a"
    message.kv.cache_salt = "tenant"
    wanted = Prompt(struct.pack("<2I", 1, 2**32 - 1), Root("style-a", "tenant"))
    assert parse(message).prompt == wanted
    message.kv.bypass_prefix_cache = True
    assert parse(message).prompt is None
    message.kv.bypass_prefix_cache = False
    message.media.add()
    assert parse(message).prompt is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "\u00e9" * (MAX_ID_BYTES // 2 + 1)}, "request_id"),
        ({"model": ""}, "model"),
        ({"token_ids": oe.TokenIds()}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": None, "prompt": "hello"}, "prompt"),
        ({"stopping": oe.StoppingOptions(max_tokens=0)}, "stopping.max_tokens"),
        ({"stopping": oe.StoppingOptions(max_tokens=2, min_tokens=3)}, "stopping.min_tokens"),
        ({"sampling": oe.SamplingParams(num_sequences=0)}, "sampling.num_sequences"),
        ({"kv": oe.KvOptions(session=session())}, "kv.session"),
        ({"kv": oe.KvOptions(session=oe.KvSessionRef())}, "kv.session"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], field: str) -> None:
    message = request()
    for name, value in change.items():
        message.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, str):
            setattr(message, name, value)
        elif value is not None:
            getattr(message, name).CopyFrom(value)
            getattr(message, name).SetInParent()
    error = refused(message)
    assert error.field == field
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("min_p", math.inf),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", 1e39),
        ("repetition_penalty", 1e-50),
        ("presence_penalty", -math.inf),
        ("repetition_penalty", 0.0),
    ],
)
def test_engine_08_a_sampling_value_that_no_engine_can_use_is_refused_here(
    field: str, value: float
) -> None:
    """ENGINE-08: whoever serves behind the gateway, it never sees it."""
    message = request()
    setattr(message.sampling, field, value)
    error = refused(message)
    assert (error.field, error.code) == (f"sampling.{field}", grpc.StatusCode.INVALID_ARGUMENT)


def test_engine_08_stop_conditions_are_limited_here_and_off_is_off() -> None:
    message = request()
    for _ in range(MAX_STOP_CONDITIONS):
        message.stopping.conditions.add(stop_token_id=1)
    message.sampling.MergeFrom(oe.SamplingParams(top_k=-1, temperature=0, top_p=1, seed=0))
    parse(message)
    message.stopping.conditions.add(stop_token_id=1)
    assert refused(message).field == "stopping.conditions"


@pytest.mark.parametrize("value", ["context_only", "", "context_and_generation"])
def test_a_clients_own_request_type_is_refused(value: str) -> None:
    message = request()
    message.extra.update({"request_type": value})
    assert refused(message).field == "extra.request_type"


@pytest.mark.parametrize("key", ["nvext", "router", "ttft_target", "itl_ms", "tpot_ms"])
def test_cfg_01_a_target_in_an_undocumented_place_is_refused_with_the_right_one(key: str) -> None:
    message = request()
    message.extra.update({key: 150})
    error = refused(message)
    assert error.field == f"extra.{key}"
    assert "x-slo-ttft-ms" in str(error)


def test_other_keys_of_extra_are_the_engines() -> None:
    message = request()
    message.extra.update({"conversation_id": "c"})
    assert parse(message).data == message.SerializeToString()


def test_more_than_one_sequence_is_unsupported_rather_than_wrong() -> None:
    message = request()
    message.sampling.num_sequences = 2
    error = refused(message)
    assert isinstance(error, Unsupported)
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    message.sampling.num_sequences = 1
    parse(message)


def test_a_request_over_the_limit_names_the_input_that_is_to_blame() -> None:
    for change, field in (("token_ids", "token_ids"), ("prompt", "prompt")):
        message = request()
        if change == "prompt":
            message.prompt = "x" * 1000
        else:
            message.token_ids.ids.extend(range(1000))
        error = refused(message, max_bytes=900)
        assert isinstance(error, TooLarge)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.outcome is Outcome.TOO_LARGE
        assert error.field == field
        assert "900 bytes" in str(error)


def test_a_request_of_exactly_the_limit_is_taken() -> None:
    n_bytes = request().ByteSize()
    parse(request(), max_bytes=n_bytes)
    assert isinstance(refused(request(), max_bytes=n_bytes - 1), TooLarge)


@pytest.mark.parametrize(
    ("data", "largest"),
    [
        (b"\xff", "request"),
        (b"\x0a\x05ab", "request_id"),
        (b"\x0a\x01\xff", "request_id"),
        (b"<html>", "request"),
    ],
)
def test_bytes_that_are_no_message_are_refused_whatever_their_size(
    data: bytes, largest: str
) -> None:
    """Over the limit only tags are read, so there the field to blame is all that is known."""
    with pytest.raises(InvalidRequest) as caught:
        parse_request(data, max_bytes=LIMIT)
    assert caught.value.field == "request"
    with pytest.raises(TooLarge) as large:
        parse_request(data, max_bytes=0)
    assert large.value.field == largest


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of up to 2 MiB, whatever its content means."""
    n_bytes = len(content)
    length = bytes([n_bytes & 0x7F | 0x80, n_bytes >> 7 & 0x7F | 0x80, n_bytes >> 14])
    return bytes([number << 3 | 2]) + length + content


NUMBERS = oe.GenerateRequest.DESCRIPTOR.fields_by_name


@pytest.mark.parametrize(
    ("data", "blamed"),
    [
        # No parser would take these: inside a large field nothing is looked at.
        (field(NUMBERS["token_ids"].number, b"\xff" * 2000), "token_ids"),
        (field(NUMBERS["prompt"].number, b"\xff" * 2000), "prompt"),
        (field(NUMBERS["token_ids"].number, b"\x0a" * 600) * 2, "token_ids"),
        (field(15, b"x" * 2000) + field(NUMBERS["model"].number, b"m" * 200), "request"),
        (b"\x80" * 2000, "request"),
        (b"\x0b" * 2000, "request"),
        (b"\x0d\x00\x00\x00\x00" * 500, "request_id"),
        (b"\x09" + b"\x00" * 8 + field(NUMBERS["model"].number, b"m" * 1500), "model"),
        (b"\x08\x05" * 600 + field(NUMBERS["model"].number, b"m" * 100), "request_id"),
    ],
)
def test_a_request_over_the_limit_is_blamed_by_tags_and_never_parsed(
    data: bytes, blamed: str
) -> None:
    with pytest.raises(TooLarge) as caught:
        parse_request(data, max_bytes=1000)
    assert caught.value.field == blamed


def test_the_budget_is_the_clients_or_what_the_smallest_window_leaves() -> None:
    parsed = parse(request(tokens=[1] * 10))
    windows = [model_info(window=100), None, model_info(window=30), model_info()]
    assert output_budget(parsed, windows) == 20
    assert output_budget(parsed._replace(max_tokens=7), windows) == 7
    assert output_budget(parsed, [None]) == DEFAULT_MAX_TOKENS


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    parsed = parse(request(tokens=[1] * 10))
    assert output_budget(parsed, [model_info(window=11)]) == 1
    with pytest.raises(InvalidRequest, match=r"token_ids: 10 tokens .* window of 10"):
        output_budget(parsed, [model_info(window=10)])
