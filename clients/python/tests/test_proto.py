"""The shipped descriptors and the dataclasses are in step with `proto/`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc_tools.protoc
import pytest
from google.protobuf import descriptor_pb2

import rollout_client
from rollout_client import _convert, _convert_weights, _proto, status, types
from serving import REPOSITORY


def test_descriptors_are_those_of_the_proto_files(tmp_path):
    files = sorted(str(path.relative_to(REPOSITORY / "proto")) for path in (REPOSITORY / "proto").rglob("*.proto"))
    out = tmp_path / "rollout.binpb"
    arguments = ["protoc", f"-I{REPOSITORY / 'proto'}", f"--descriptor_set_out={out}", *files]
    assert grpc_tools.protoc.main(arguments) == 0

    def by_name(path):
        descriptors = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())
        return {file.name: file for file in descriptors.file}

    shipped = by_name(Path(rollout_client.__file__).with_name("rollout.binpb"))
    assert by_name(out) == shipped, "proto/ has changed: run `make proto`"


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (types.SamplingParams, "SamplingParams"),
        (types.Sample, "Completion"),
        (types.TokenDelta, "TokenDelta"),
        (types.PromptTokens, "PromptTokens"),
        (types.PromptLogprobs, "PromptLogprobs"),
        (types.PromptRouting, "PromptRouting"),
        (types.Summary, "GenerateSummary"),
        (types.VersionSpan, "VersionSpan"),
        (types.Score, "SequenceScore"),
        (types.AbortResult, "AbortResponse"),
        (types.ServerInfo, "GetInfoResponse"),
        (rollout_client.RoutingInfo, "RoutingInfo"),
        (rollout_client.PolicyScore, "PolicyScore"),
        (status.ServerStatus, "GetStatusResponse"),
        (status.MemoryLedger, "MemoryLedger"),
        (status.OpenUpdate, "OpenUpdate"),
        (status.Stall, "Stall"),
        (rollout_client.Timeline, "GetTimelineResponse"),
        (rollout_client.Span, "Span"),
        (rollout_client.PhaseTime, "PhaseTime"),
    ],
)
def test_dataclass_has_the_fields_of_its_message(cls, message):
    fields = {field.name for field in dataclasses.fields(cls)}
    assert fields == set(_proto.message(message).DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("table", "message", "field"),
    [
        (_convert._FINISH_REASONS, "Completion", "finish_reason"),
        (_convert_weights.LIFECYCLES, "GetStatusResponse", "lifecycle"),
    ],
)
def test_enums_have_the_values_of_the_proto(table, message, field):
    enum = _proto.message(message).DESCRIPTOR.fields_by_name[field].enum_type
    prefix = {"finish_reason": "FINISH_REASON_", "lifecycle": "LIFECYCLE_"}[field]
    assert {value.name: value.number for value in enum.values if value.number != 0} == {
        prefix + member.name: number for number, member in table.items()
    }
