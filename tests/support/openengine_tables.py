"""A second, independent description of the OpenEngine v1 (v0.1.0) wire, with message classes.

The text below restates the published tables; proto/openengine.proto is written separately. Tests
compare the two field by field, so a slip in either shows, and use these classes as a foreign client
that shares no generated code with the product. The descriptors live in a pool of their own, because
two files that declare the same message names cannot share one.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

PACKAGE = "openengine.v1"

# Message: field number type label; ... Labels: imp no presence, opt explicit presence, msg a
# singular message, rep repeated, oneof:x member of the oneof x.
_MESSAGES = """
GenerateRequest: request_id 1 string imp; model 2 string imp; prompt 3 string oneof:input;
    token_ids 4 TokenIds oneof:input; sampling 5 SamplingParams msg;
    stopping 6 StoppingOptions msg; response 7 ResponseOptions msg; kv 8 KvOptions msg;
    guided 9 GuidedDecoding msg; media 10 MediaItem rep; lora_name 11 string imp;
    extra 12 Struct msg
TokenIds: ids 1 uint32 rep
MediaItem: modality 1 Modality imp; url 2 string oneof:source; data_uri 3 string oneof:source;
    raw_bytes 4 bytes oneof:source; mime_type 5 string imp; uuid 6 string imp
SamplingParams: temperature 1 double opt; top_p 2 double opt; top_k 3 int32 opt;
    min_p 4 double opt; frequency_penalty 5 double opt; presence_penalty 6 double opt;
    repetition_penalty 7 double opt; seed 8 uint64 opt; num_sequences 9 uint32 opt
StoppingOptions: max_tokens 1 uint32 opt; min_tokens 2 uint32 opt; conditions 3 StopCondition rep;
    ignore_eos 4 bool opt; include_stop_in_output 5 bool opt
StopCondition: stop_text 1 string oneof:condition; stop_token_id 2 uint32 oneof:condition
ResponseOptions: return_prompt_logprobs 1 bool opt;
    prompt_candidates 2 CandidateTokenSelection msg; return_output_logprobs 3 bool opt;
    output_candidates 4 CandidateTokenSelection msg; prompt_logprob_start 5 uint32 opt
CandidateTokenSelection: top_n 1 uint32 oneof:selection; token_ids 2 TokenIds oneof:selection;
    all 3 AllCandidates oneof:selection
AllCandidates:
KvOptions: session 1 KvSessionRef msg; bypass_prefix_cache 2 bool opt; cache_salt 3 string opt
GuidedDecoding: json_schema 1 string oneof:guide; regex 2 string oneof:guide;
    ebnf_grammar 3 string oneof:guide; structural_tag 4 string oneof:guide;
    choice 5 ChoiceConstraint oneof:guide; json_object 6 JsonObjectConstraint oneof:guide;
    backend 7 string imp
ChoiceConstraint: choices 1 string rep
JsonObjectConstraint:
GenerateResponse: request_id 1 string imp; prompt 2 PromptOutput oneof:event;
    token 3 TokenOutput oneof:event; prefill_ready 4 PrefillReady oneof:event;
    finished 5 GenerationFinished oneof:event; error 6 EngineError oneof:event; usage 10 Usage msg
PromptOutput: tokens 1 TokenInfo rep
TokenOutput: output_index 1 uint32 opt; tokens 2 TokenInfo rep; text 3 string imp
TokenInfo: token_id 1 uint32 imp; token 2 string imp; logprob 3 double opt; rank 4 uint32 opt;
    candidates 5 LogProb rep
LogProb: token_id 1 uint32 imp; logprob 2 double imp; token 3 string imp; rank 4 uint32 opt
PrefillReady: kv_session 1 KvSessionRef msg
GenerationFinished: output_index 1 uint32 opt; reason 2 FinishReason imp; message 3 string imp;
    stop_match 4 StopMatch msg
StopMatch: stop_token_id 1 uint32 oneof:match; stop_text 2 string oneof:match;
    eos_token_id 3 uint32 oneof:match
Usage: prompt_tokens 1 uint32 imp; completion_tokens 2 uint32 imp; total_tokens 3 uint32 imp;
    cached_prompt_tokens 4 uint32 opt; reasoning_tokens 5 uint32 opt
KvSessionRef: session_id 1 string imp; transfer_backend 2 string imp; endpoints 3 KvEndpoint rep;
    dp_rank 4 uint32 imp; attributes_struct 5 Struct msg
KvEndpoint: host 1 string imp; port 2 uint32 imp; protocol 3 string imp
KvConnectorInfo: enabled 1 bool opt; transfer_backend 2 string imp;
    local_endpoints 3 KvEndpoint rep; supported_protocols 4 string rep;
    supports_remote_prefill 5 bool opt; supports_decode_pull 6 bool opt;
    supports_abort_cleanup 7 bool opt; schema_version 8 uint32 opt
GetKvEventSourcesRequest: data_parallel_ranks 1 uint32 rep
GetKvEventSourcesResponse: sources 1 KvEventSource rep
KvEventSource: transport 1 string imp; endpoint_addr 2 KvEndpoint msg; topic 3 string imp;
    replay_endpoint 4 string imp; data_parallel_rank 5 uint32 opt; encoding 6 string imp;
    schema_version 7 uint32 opt; buffer_steps 8 uint32 opt; hwm 9 uint32 opt;
    max_queue_size 10 uint32 opt
SubscribeKvEventsRequest: data_parallel_ranks 1 uint32 rep; include_snapshot 2 bool imp;
    start_sequence_number 3 uint64 imp
SubscribeKvEventsResponse: batch 1 KvEventBatch oneof:event; error 2 EngineError oneof:event
KvEventBatch: sequence_number 1 uint64 imp; timestamp_unix_nanos 2 uint64 imp;
    data_parallel_rank 3 uint32 imp; events 4 KvEvent rep
KvEvent: request_id 1 string imp; kv_session 2 KvSessionRef msg;
    block_stored 10 BlockStored oneof:event; block_removed 11 BlockRemoved oneof:event;
    all_blocks_cleared 12 AllBlocksCleared oneof:event
BlockStored: block_hashes 1 KvBlockHash rep; parent_block_hash 2 KvBlockHash msg;
    token_ids 3 uint32 rep; block_size 4 uint32 imp; lora_id 5 int64 imp; lora_name 6 string imp;
    medium 7 StorageMedium imp; extra_keys 20 OpaqueKeyTuple rep; group_idx 21 uint32 imp;
    kv_cache_spec_kind 22 string imp; kv_cache_spec_sliding_window 23 uint32 imp
BlockRemoved: block_hashes 1 KvBlockHash rep; medium 2 StorageMedium imp; group_idx 3 uint32 imp
AllBlocksCleared:
KvBlockHash: value 1 bytes imp; encoding 2 string imp
OpaqueKeyTuple: values 1 string rep
GetServerInfoRequest:
ServerInfo: engine_name 1 string imp; engine_version 2 string imp; engine_role 3 EngineRole imp;
    instance_id 4 string imp; supported_models 5 string rep; parallelism 6 ParallelismInfo msg;
    kv_connector 7 KvConnectorInfo msg; schema_revision 8 uint32 imp;
    minimum_client_revision 9 uint32 imp; schema_release 10 string imp;
    capacity 11 DeploymentCapacity msg; extra 12 Struct msg
DeploymentCapacity: kv_block_size 1 uint32 opt; total_kv_blocks 2 uint64 opt;
    max_running_requests 3 uint64 opt; max_batched_tokens 4 uint64 opt; max_loras 5 uint32 opt
ParallelismInfo: tensor_parallel_size 1 uint32 opt; pipeline_parallel_size 2 uint32 opt;
    data_parallel_size 3 uint32 opt; data_parallel_rank 4 uint32 opt;
    data_parallel_start_rank 5 uint32 opt; decode_context_parallel_size 6 uint32 opt
GetLoadRequest: include_per_rank 1 bool imp
LoadInfo: instance_id 1 string imp; timestamp_unix_nanos 2 uint64 opt;
    running_requests 3 uint32 opt; queued_requests 4 uint32 opt; active_kv_sessions 5 uint32 opt;
    used_kv_blocks 6 uint64 opt; total_kv_blocks 7 uint64 opt; running_tokens 8 uint64 opt;
    waiting_tokens 9 uint64 opt; prefill_batch_size 10 uint32 opt;
    decode_batch_size 11 uint32 opt; ranks 20 RankLoadInfo rep; attributes 30 Struct msg
RankLoadInfo: data_parallel_rank 1 uint32 opt; running_requests 2 uint32 opt;
    queued_requests 3 uint32 opt; used_kv_blocks 4 uint64 opt; total_kv_blocks 5 uint64 opt;
    prefill_batch_size 6 uint32 opt; decode_batch_size 7 uint32 opt
GetModelInfoRequest: model 1 string imp
ModelInfo: model_id 1 string imp; served_model_name 2 string imp;
    served_model_aliases 3 string rep; max_context_length 4 uint32 opt;
    max_output_tokens 5 uint32 opt; tokenizer_modes 10 string rep;
    supports_text_input 20 bool opt; supports_token_ids_input 21 bool opt;
    generation 22 GenerationCapabilities msg; supports_lora 23 bool opt;
    supports_multimodal 24 bool opt; reasoning_parser 25 string imp;
    tool_call_parser 26 string imp; extra 28 Struct msg
GenerationCapabilities: prompt_logprobs 1 LogprobCapabilities msg;
    output_logprobs 2 LogprobCapabilities msg; guided_decoding 3 GuidedDecodingCapabilities msg;
    max_num_sequences 4 uint32 opt; supports_priority 5 bool opt;
    supports_stop_in_output 6 bool opt; supports_cache_salt 7 bool opt;
    supports_prefix_cache_bypass 8 bool opt
LogprobCapabilities: supported 1 bool opt;
    candidate_selection_modes 2 CandidateTokenSelectionMode rep; max_top_n 3 uint32 opt
GuidedDecodingCapabilities: supported 1 bool opt; modes 2 GuidedDecodingMode rep
HealthRequest: include_inference_probe 1 bool imp; model 2 string imp; role 3 EngineRole imp
HealthResponse: state 1 HealthState imp; checks 2 HealthCheck rep
HealthCheck: name 1 string imp; state 2 HealthState imp; message 3 string imp
AbortRequest: request_id 1 string oneof:target; kv_session 2 KvSessionRef oneof:target;
    all_requests 3 AllRequests oneof:target
AllRequests:
AbortResponse: status 1 AbortStatus imp; message 2 string imp
LoraAdapter: lora_id 1 int64 imp; lora_name 2 string imp; source_path 3 string imp
LoadLoraRequest: adapter 1 LoraAdapter msg
LoadLoraResponse: adapter 1 LoraAdapter msg; already_loaded 2 bool imp
UnloadLoraRequest: lora_name 1 string imp
UnloadLoraResponse: adapter 1 LoraAdapter msg
ListLorasRequest:
ListLorasResponse: adapters 1 LoraAdapter rep
EngineError: code 1 ErrorCode imp; message 2 string imp; retryable 3 bool imp
"""

# Enum: common prefix of the value names, then the names in the order of their numbers, from 0.
_ENUMS = """
Modality: MODALITY UNSPECIFIED IMAGE VIDEO AUDIO
FinishReason: FINISH_REASON UNSPECIFIED STOP LENGTH CANCELLED
StorageMedium: STORAGE_MEDIUM UNSPECIFIED GPU CPU_PINNED DISK EXTERNAL
EngineRole: ENGINE_ROLE UNSPECIFIED AGGREGATED PREFILL DECODE
CandidateTokenSelectionMode: CANDIDATE_TOKEN_SELECTION_MODE UNSPECIFIED TOP_N TOKEN_IDS ALL
GuidedDecodingMode: GUIDED_DECODING_MODE UNSPECIFIED JSON_SCHEMA REGEX EBNF_GRAMMAR STRUCTURAL_TAG
    CHOICE JSON_OBJECT
HealthState: HEALTH_STATE UNSPECIFIED STARTING READY DEGRADED NOT_READY
AbortStatus: ABORT_STATUS UNSPECIFIED ABORTED ALREADY_FINISHED
ErrorCode: ERROR_CODE UNSPECIFIED INVALID_ARGUMENT UNSUPPORTED_FEATURE ROLE_MISMATCH
    MODEL_NOT_FOUND OVERLOADED REQUEST_NOT_FOUND DUPLICATE_REQUEST KV_SESSION_NOT_FOUND
    KV_TRANSFER_FAILED CANCELLED INTERNAL
"""

# Method: service, request, response, and "stream" where the response is a stream.
_METHODS = """
Generate: Inference GenerateRequest GenerateResponse stream
GetServerInfo: Control GetServerInfoRequest ServerInfo
GetModelInfo: Control GetModelInfoRequest ModelInfo
GetLoad: Control GetLoadRequest LoadInfo
Health: Control HealthRequest HealthResponse
Abort: Control AbortRequest AbortResponse
LoadLora: Control LoadLoraRequest LoadLoraResponse
UnloadLora: Control UnloadLoraRequest UnloadLoraResponse
ListLoras: Control ListLorasRequest ListLorasResponse
GetKvEventSources: Control GetKvEventSourcesRequest GetKvEventSourcesResponse
SubscribeKvEvents: Control SubscribeKvEventsRequest SubscribeKvEventsResponse stream
"""


class Field(NamedTuple):
    """One row of a message's table."""

    name: str
    number: int
    type: str
    label: str


class Method(NamedTuple):
    """One RPC; requests are never streams."""

    service: str
    name: str
    request: str
    response: str
    streams_response: bool

    @property
    def path(self) -> str:
        """The HTTP/2 path that gRPC calls."""
        return f"/{PACKAGE}.{self.service}/{self.name}"

    def of(self, channel: grpc.Channel | grpc.aio.Channel) -> Callable[..., Any]:
        """What calls this RPC over the channel, with the classes of the tables."""
        make = channel.unary_stream if self.streams_response else channel.unary_unary
        return make(
            self.path,
            request_serializer=tables()[self.request].SerializeToString,
            response_deserializer=tables()[self.response].FromString,
        )


def _entries(text: str) -> dict[str, str]:
    """Name -> the rest of its entry; an entry may go on over indented lines."""
    parts = re.split(r"^(\w+):", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], (" ".join(rest.split()) for rest in parts[1::2]), strict=True))


def _fields(row_text: str) -> list[Field]:
    rows = (row.split() for row in row_text.split(";") if row)
    return [Field(name, int(number), kind, label) for name, number, kind, label in rows]


def _method(name: str, rest: str) -> Method:
    service, request, response, *stream = rest.split()
    return Method(service, name, request, response, streams_response=stream == ["stream"])


MESSAGES = {name: _fields(rest) for name, rest in _entries(_MESSAGES).items()}
ENUMS = {
    name: [f"{rest.split()[0]}_{value}" for value in rest.split()[1:]]
    for name, rest in _entries(_ENUMS).items()
}
METHODS = {name: _method(name, rest) for name, rest in _entries(_METHODS).items()}


def _set_type(proto: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    """Fills type and type_name from the spelling used in the tables."""
    if kind == "Struct":
        proto.type, proto.type_name = proto.TYPE_MESSAGE, ".google.protobuf.Struct"
    elif kind in MESSAGES or kind in ENUMS:
        proto.type = proto.TYPE_MESSAGE if kind in MESSAGES else proto.TYPE_ENUM
        proto.type_name = f".{PACKAGE}.{kind}"
    else:
        proto.type = proto.Type.Value(f"TYPE_{kind.upper()}")


def _add_message(file: descriptor_pb2.FileDescriptorProto, name: str, fields: list[Field]) -> None:
    """Adds one message; what protoc calls a synthetic oneof has to follow the real ones."""
    message = file.message_type.add(name=name)
    oneofs = list(dict.fromkeys(f.label[6:] for f in fields if f.label.startswith("oneof:")))
    for field in fields:
        proto = message.field.add(name=field.name, number=field.number)
        proto.label = proto.LABEL_REPEATED if field.label == "rep" else proto.LABEL_OPTIONAL
        _set_type(proto, field.type)
        if field.label.startswith("oneof:"):
            proto.oneof_index = oneofs.index(field.label[6:])
        elif field.label == "opt":
            proto.proto3_optional = True
            proto.oneof_index = len(oneofs)
            oneofs.append(f"_{field.name}")
    for oneof in oneofs:
        message.oneof_decl.add(name=oneof)


@functools.cache
def file_descriptor() -> FileDescriptor:
    """The tables as one descriptor file in a pool of its own."""
    file = descriptor_pb2.FileDescriptorProto(
        name="openengine_tables.proto", package=PACKAGE, syntax="proto3"
    )
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in MESSAGES.items():
        _add_message(file, name, fields)
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    names = dict.fromkeys(method.service for method in METHODS.values())
    services = {name: file.service.add(name=name) for name in names}
    for method in METHODS.values():
        services[method.service].method.add(
            name=method.name,
            input_type=f".{PACKAGE}.{method.request}",
            output_type=f".{PACKAGE}.{method.response}",
            server_streaming=method.streams_response,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)


@functools.cache
def tables() -> Mapping[str, type[Message]]:
    """Message name -> class, made from the tables alone."""
    descriptors = file_descriptor().message_types_by_name
    return {name: message_factory.GetMessageClass(d) for name, d in descriptors.items()}
