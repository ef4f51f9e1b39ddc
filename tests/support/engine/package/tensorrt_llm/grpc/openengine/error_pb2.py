"""Registers a message and an enum of OpenEngine in protobuf's default pool, as generated code does."""

from google.protobuf import descriptor_pb2, descriptor_pool

_FILE = descriptor_pb2.FileDescriptorProto(
    name="openengine/v1/error.proto",
    package="openengine.v1",
    syntax="proto3",
    message_type=[descriptor_pb2.DescriptorProto(name="EngineError")],
    enum_type=[
        descriptor_pb2.EnumDescriptorProto(
            name="ErrorCode",
            value=[
                descriptor_pb2.EnumValueDescriptorProto(name="ERROR_CODE_UNSPECIFIED", number=0)
            ],
        )
    ],
)
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(_FILE.SerializeToString())
