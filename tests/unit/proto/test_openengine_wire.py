"""The OpenEngine wire: byte vectors, and what appended bytes do to a message.

Each with the generated classes and with those of an independent description of the same wire.
"""

from collections.abc import Mapping

import pytest
from google.protobuf import message_factory, text_format
from google.protobuf.message import Message

from slagate.proto import openengine_pb2
from support.openengine_tables import tables

Classes = Mapping[str, type[Message]]

GENERATED: Classes = {
    name: message_factory.GetMessageClass(descriptor)
    for name, descriptor in openengine_pb2.DESCRIPTOR.message_types_by_name.items()
}


@pytest.fixture(params=["generated", "tables"])
def classes(request: pytest.FixtureRequest) -> Classes:
    """Message classes by name, once from the generated code and once from the tables."""
    return GENERATED if request.param == "generated" else tables()


def parse_text(classes: Classes, name: str, text: str) -> Message:
    return text_format.Parse(text, classes[name]())


# --- bytes ---------------------------------------------------------------------------------------

# Name -> (message, content in text format, bytes in hex). Zeros that are spelled out are present.
VECTORS = {
    "V1": (
        "GenerateRequest",
        """request_id: "r1" model: "m" token_ids { ids: [1, 2, 300] }
        sampling { temperature: 0 } stopping { max_tokens: 1 }
        extra { fields { key: "request_type" value { string_value: "context_only" } } }""",
        "0a02723112016d22060a040102ac022a090900000000000000003202080162200a1e0a0c72657175"
        "6573745f74797065120e1a0c636f6e746578745f6f6e6c79",
    ),
    "V2": (
        "GenerateRequest",
        """request_id: "r1" model: "m" prompt: "hi" kv {
          session {
            session_id: "42" transfer_backend: "NIXL" dp_rank: 3
            endpoints { host: "h" port: 9000 protocol: "tcp" }
          }
          cache_salt: "t"
        }""",
        "0a02723112016d1a026869421e0a190a02343212044e49584c1a0b0a016810a8461a0374637020031a0174",
    ),
    "V3": (
        "GenerateResponse",
        'request_id: "r1" token { output_index: 0 tokens { token_id: 7 } text: "x" }',
        "0a0272311a090800120208071a0178",
    ),
    "V4": (
        "GenerateResponse",
        """request_id: "r1"
        finished { output_index: 0 reason: FINISH_REASON_STOP stop_match { eos_token_id: 2 } }
        usage { prompt_tokens: 3 completion_tokens: 1 total_tokens: 4 cached_prompt_tokens: 0 }""",
        "0a0272312a08080010012202180252080803100118042000",
    ),
    "V5": (
        "GenerateResponse",
        """request_id: "r1" prefill_ready { kv_session {
          session_id: "42"
          attributes_struct { fields { key: "opaque_state" value { string_value: "AA==" } } }
        } }""",
        "0a02723122200a1e0a0234322a180a160a0c6f70617175655f737461746512061a0441413d3d",
    ),
    "V6": (
        "GenerateResponse",
        'request_id: "r1" error { code: ERROR_CODE_INTERNAL message: "x" }',
        "0a0272313205080b120178",
    ),
    "V7": (
        "KvConnectorInfo",
        """enabled: true transfer_backend: "NIXL" supports_abort_cleanup: false
        schema_version: 1""",
        "080112044e49584c38004001",
    ),
    "V8": (
        "HealthResponse",
        """state: HEALTH_STATE_NOT_READY
        checks { name: "grpc" state: HEALTH_STATE_READY }""",
        "080412080a04677270631002",
    ),
    "V9": ("AbortRequest", "all_requests {}", "1a00"),
    "V10": (
        "SubscribeKvEventsResponse",
        """batch { sequence_number: 5 data_parallel_rank: 1 events { block_stored {
          block_hashes { value: "\\x01" encoding: "bytes" } token_ids: [1, 2] block_size: 2
          medium: STORAGE_MEDIUM_GPU group_idx: 1
        } } }""",
        "0a1f08051801221952170a0a0a0101120562797465731a02010220023801a80101",
    ),
    "V11": (
        "LoadInfo",
        """instance_id: "i" running_requests: 0 used_kv_blocks: 9
        ranks { data_parallel_rank: 0 }
        attributes { fields { key: "a" value { bool_value: true } } }""",
        "0a016918003009a201020800f201090a070a016112022001",
    ),
    # An empty Struct that is only updated with nothing stays unset, so `extra` is not written.
    "V12": (
        "ModelInfo",
        """model_id: "m" max_context_length: 8 supports_text_input: true generation {
          output_logprobs { candidate_selection_modes: [
            CANDIDATE_TOKEN_SELECTION_MODE_TOP_N, CANDIDATE_TOKEN_SELECTION_MODE_ALL
          ] }
          supports_priority: false
        }""",
        "0a016d2008a00101b201081204120201032800",
    ),
    "V13": (
        "ServerInfo",
        """engine_name: "e" schema_revision: 1 minimum_client_revision: 1
        schema_release: "768a93c7b44e40f28c692ad0b471a8f2"
        capacity { kv_block_size: 32 } parallelism { data_parallel_size: 2 }""",
        "0a01653202180240014801522037363861393363376234346534306632386336393261643062343731"
        "613866325a020820",
    ),
}


@pytest.mark.parametrize("vector", VECTORS)
def test_a_message_has_exactly_the_published_bytes(classes: Classes, vector: str) -> None:
    name, text, wire = VECTORS[vector]
    message = parse_text(classes, name, text)
    assert message.SerializeToString(deterministic=True).hex() == wire


@pytest.mark.parametrize("vector", VECTORS)
def test_the_published_bytes_parse_to_the_message(classes: Classes, vector: str) -> None:
    name, text, wire = VECTORS[vector]
    parsed = classes[name].FromString(bytes.fromhex(wire))
    assert parsed == parse_text(classes, name, text)


# --- merging -------------------------------------------------------------------------------------

# What the client sent, what is appended, what a worker must read. The gateway changes a request
# by appending bytes only, so each of these is something a leg relies on.
MERGES = {
    "a scalar set again takes the last value": (
        'request_id: "client" model: "m"',
        'request_id: "leg"',
        'request_id: "leg" model: "m"',
    ),
    "a sub-message keeps what the appended one does not name": (
        "stopping { max_tokens: 128 min_tokens: 5 ignore_eos: true }",
        "stopping { max_tokens: 1 min_tokens: 0 }",
        "stopping { max_tokens: 1 min_tokens: 0 ignore_eos: true }",
    ),
    "a sub-message the client left out is created": (
        'request_id: "client"',
        "stopping { max_tokens: 1 }",
        'request_id: "client" stopping { max_tokens: 1 }',
    ),
    "a map gains the appended key": (
        'extra { fields { key: "a" value { bool_value: true } } }',
        'extra { fields { key: "request_type" value { string_value: "context_only" } } }',
        """extra { fields { key: "a" value { bool_value: true } }
        fields { key: "request_type" value { string_value: "context_only" } } }""",
    ),
    "a map key set again takes the last value": (
        'extra { fields { key: "request_type" value { string_value: "generation_only" } } }',
        'extra { fields { key: "request_type" value { string_value: "context_only" } } }',
        'extra { fields { key: "request_type" value { string_value: "context_only" } } }',
    ),
    "a repeated field is concatenated": (
        'stopping { conditions { stop_text: "a" } conditions { stop_token_id: 7 } }',
        'stopping { conditions { stop_text: "b" } }',
        """stopping { conditions { stop_text: "a" } conditions { stop_token_id: 7 }
        conditions { stop_text: "b" } }""",
    ),
    "a packed repeated field is concatenated": (
        "token_ids { ids: [1, 2] }",
        "token_ids { ids: [300] }",
        "token_ids { ids: [1, 2, 300] }",
    ),
    "a session joins the client's own kv options": (
        'kv { cache_salt: "tenant" bypass_prefix_cache: true }',
        'kv { session { session_id: "42" } }',
        'kv { cache_salt: "tenant" bypass_prefix_cache: true session { session_id: "42" } }',
    ),
    # Why a client's own kv.session is refused: its fields would survive beside the gateway's.
    "a client's own session would survive inside the appended one": (
        'kv { session { transfer_backend: "UCX" endpoints { host: "evil" } } }',
        'kv { session { session_id: "42" endpoints { host: "p0" } } }',
        """kv { session { session_id: "42" transfer_backend: "UCX"
        endpoints { host: "evil" } endpoints { host: "p0" } } }""",
    ),
    "another member of a oneof replaces the first": (
        'prompt: "hi"',
        "token_ids { ids: [1] }",
        "token_ids { ids: [1] }",
    ),
    "an explicit zero overrides": (
        "sampling { temperature: 0.7 top_p: 0.9 }",
        "sampling { temperature: 0 }",
        "sampling { temperature: 0 top_p: 0.9 }",
    ),
}


@pytest.mark.parametrize("rule", MERGES)
def test_appended_request_bytes_merge(classes: Classes, rule: str) -> None:
    client, appended, expected = (
        parse_text(classes, "GenerateRequest", text) for text in MERGES[rule]
    )
    leg = client.SerializeToString() + appended.SerializeToString()
    assert classes["GenerateRequest"].FromString(leg) == expected


def test_an_implicit_zero_cannot_override() -> None:
    """A scalar without presence writes nothing when zero, so nothing appended can clear it."""
    client = openengine_pb2.GenerateRequest(lora_name="adapter")
    appended = openengine_pb2.GenerateRequest(lora_name="")
    assert appended.SerializeToString() == b""
    leg = client.SerializeToString() + appended.SerializeToString()
    assert openengine_pb2.GenerateRequest.FromString(leg).lora_name == "adapter"


@pytest.mark.parametrize("vector", ["V3", "V4", "V5", "V6"])
def test_a_response_with_the_client_id_appended_differs_in_the_id_only(
    classes: Classes, vector: str
) -> None:
    name, text, wire = VECTORS[vector]
    appended = classes[name](request_id="client").SerializeToString()
    relayed = classes[name].FromString(bytes.fromhex(wire) + appended)
    assert relayed == parse_text(classes, name, text.replace('"r1"', '"client"'))


def test_a_handoff_keeps_fields_this_contract_does_not_know(classes: Classes) -> None:
    """A newer engine's session must reach its decode engine whole: field 6 is a string there."""
    unknown = bytes.fromhex("3204") + b"prof"
    ready = classes["PrefillReady"].FromString(bytes.fromhex("0a0a0a023432") + unknown)
    leg = classes["GenerateRequest"]()
    leg.kv.session.CopyFrom(ready.kv_session)
    assert unknown in leg.SerializeToString()


def test_an_enum_value_of_a_newer_release_survives_parsing(classes: Classes) -> None:
    response = classes["HealthResponse"].FromString(bytes.fromhex("0863"))
    assert response.state == 99
    assert response.SerializeToString() == bytes.fromhex("0863")
