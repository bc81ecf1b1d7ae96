"""Python's own reflection client, which asks by v1alpha, can call the server without its protos."""

from __future__ import annotations

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def test_a_client_without_protos_finds_and_calls_a_method(client):
    info = client.info()
    with grpc.insecure_channel(client.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"rollout.v1.Rollout", "rollout.v1.Weights", "rollout.v1.Control"} <= set(database.get_services())
        method = DescriptorPool(database).FindServiceByName("rollout.v1.Control").FindMethodByName("GetInfo")
        call = channel.unary_unary(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = call(GetMessageClass(method.input_type)(), timeout=30)
    assert (answer.model, answer.vocab_size) == (info.model, info.vocab_size)
