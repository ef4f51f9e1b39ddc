"""The OpenEngine schema and its services, against an independent description of them."""

from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from slagate.proto import openengine_pb2, openengine_pb2_grpc
from support import openengine_tables
from support.openengine_tables import METHODS, PACKAGE

type_name = descriptor_pb2.FieldDescriptorProto.Type.Name
label_name = descriptor_pb2.FieldDescriptorProto.Label.Name


# --- messages ------------------------------------------------------------------------------------


def message_shape(file: FileDescriptor, name: str) -> dict[str, dict[str, Any]]:
    """Field name -> all that a field can be on the wire and in the language bindings."""
    descriptor = file.message_types_by_name[name]
    proto = descriptor_pb2.DescriptorProto()
    descriptor.CopyToProto(proto)
    assert not proto.nested_type
    assert not proto.enum_type
    shape = {}
    for field in proto.field:
        bound = descriptor.fields_by_name[field.name]
        real_oneof = field.HasField("oneof_index") and not field.proto3_optional
        shape[field.name] = {
            "number": field.number,
            "type": type_name(field.type),
            "type_name": field.type_name,
            "label": label_name(field.label),
            "oneof": proto.oneof_decl[field.oneof_index].name if real_oneof else None,
            "optional": field.proto3_optional,
            "presence": bound.has_presence,
        }
    return shape


def enum_values(file: FileDescriptor, name: str) -> dict[str, int]:
    return {value.name: value.number for value in file.enum_types_by_name[name].values}


def test_the_declared_messages_are_exactly_those_of_the_tables() -> None:
    assert set(openengine_pb2.DESCRIPTOR.message_types_by_name) == set(openengine_tables.MESSAGES)
    assert set(openengine_pb2.DESCRIPTOR.enum_types_by_name) == set(openengine_tables.ENUMS)


@pytest.mark.parametrize("name", openengine_tables.MESSAGES)
def test_a_message_has_the_fields_of_its_table(name: str) -> None:
    declared = message_shape(openengine_pb2.DESCRIPTOR, name)
    assert declared == message_shape(openengine_tables.file_descriptor(), name)


@pytest.mark.parametrize("name", openengine_tables.ENUMS)
def test_an_enum_has_the_values_of_its_table(name: str) -> None:
    declared = enum_values(openengine_pb2.DESCRIPTOR, name)
    assert declared == enum_values(openengine_tables.file_descriptor(), name)


def test_numbers_that_differ_between_published_copies_are_those_of_the_release() -> None:
    """A copy from before v0.1.0 also says revision 1, but its numbers mean something else."""
    assert openengine_pb2.HEALTH_STATE_NOT_READY == 4
    assert openengine_pb2.ERROR_CODE_INTERNAL == 11
    connector = openengine_pb2.KvConnectorInfo.DESCRIPTOR
    assert connector.fields_by_name["schema_version"].number == 8
    assert "supports_drain" not in connector.fields_by_name
    for enum in openengine_pb2.DESCRIPTOR.enum_types_by_name.values():
        assert not [value.name for value in enum.values if "DRAIN" in value.name]


# --- services ------------------------------------------------------------------------------------


class RecordingServer:
    """Takes the handlers that generated code registers on a grpc server."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers again, in the form that servers before 1.60 need."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class RecordingChannel:
    """Takes the calls that a client sets up on a grpc channel."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}

    def unary_unary(self, path: str, **_: object) -> None:
        self.kinds[path] = "unary"

    def unary_stream(self, path: str, **_: object) -> None:
        self.kinds[path] = "stream"


def test_the_served_paths_and_kinds_are_those_of_the_tables() -> None:
    server = RecordingServer()
    openengine_pb2_grpc.add_InferenceServicer_to_server(
        openengine_pb2_grpc.InferenceServicer(), server
    )
    openengine_pb2_grpc.add_ControlServicer_to_server(openengine_pb2_grpc.ControlServicer(), server)
    served = {
        path: (handler.request_streaming, handler.response_streaming)
        for path, handler in server.handlers.items()
    }
    assert served == {m.path: (False, m.streams_response) for m in METHODS.values()}


def test_the_called_paths_and_kinds_are_those_of_the_tables() -> None:
    ours, foreign = RecordingChannel(), RecordingChannel()
    openengine_pb2_grpc.InferenceStub(ours)
    openengine_pb2_grpc.ControlStub(ours)
    for method in METHODS.values():
        method.of(foreign)
    assert ours.kinds == foreign.kinds
    assert ours.kinds["/openengine.v1.Inference/Generate"] == "stream"
    assert ours.kinds["/openengine.v1.Control/SubscribeKvEvents"] == "stream"
    assert list(ours.kinds.values()).count("unary") == 9


def test_each_rpc_has_the_message_types_of_the_tables() -> None:
    declared = {
        method.name: (method.input_type.full_name, method.output_type.full_name)
        for service in openengine_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert declared == {
        name: (f"{PACKAGE}.{m.request}", f"{PACKAGE}.{m.response}") for name, m in METHODS.items()
    }
