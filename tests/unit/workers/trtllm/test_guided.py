"""Guides of requests: what the engine gets for each, and which are refused."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import RequestRefused
from slagate.workers.sim import request as sim_request
from slagate.workers.trtllm.engine import Engine
from slagate.workers.trtllm.sampling import MAX_GUIDE_BYTES, capabilities, guided_params
from support.builders import request

Code = grpc.StatusCode


@dataclass(kw_only=True)
class Guide:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if self.regex == "(":
            raise ValueError("unbalanced parenthesis")


def engine(backend: str | None = "xgrammar", *, has_params: bool = True) -> Engine:
    args = SimpleNamespace(
        kv_cache_config=SimpleNamespace(tokens_per_block=32),
        guided_decoding_backend=backend,
        tensor_parallel_size=1,
    )
    llm = SimpleNamespace(args=args, tokenizer=None, generate_async=lambda inputs: None)
    api = SimpleNamespace(**vars(sim_request))
    if has_params:
        api.GuidedDecodingParams = Guide
    return Engine(llm, api)


def guided(**guide: Any) -> oe.GenerateRequest:
    leg = request()
    leg.guided.CopyFrom(oe.GuidedDecoding(**guide))
    return leg


SCHEMA = '{"type": "object"}'


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        ({"json_schema": SCHEMA}, Guide(json=SCHEMA)),
        ({"regex": "a+"}, Guide(regex="a+")),
        ({"ebnf_grammar": "root ::= 'a'"}, Guide(grammar="root ::= 'a'")),
        ({"structural_tag": SCHEMA}, Guide(structural_tag=SCHEMA)),
        ({"json_object": {}}, Guide(json_object=True)),
        ({"choice": {"choices": ["yes.", "no"]}}, Guide(regex=r"(yes\.|no)")),
    ],
)
def test_each_guide_has_a_field_of_the_engines(guide: dict[str, Any], expected: Guide) -> None:
    assert guided_params(guided(**guide), engine()) == expected


def test_a_request_without_a_guide_needs_no_back_end() -> None:
    assert guided_params(request(), engine(None)) is None


@pytest.mark.parametrize(
    ("guide", "on", "code", "field"),
    [
        ({"regex": "a"}, engine(None), Code.UNIMPLEMENTED, "guided"),
        ({"regex": "a"}, engine(has_params=False), Code.UNIMPLEMENTED, "guided"),
        ({"regex": "a", "backend": "xgrammar"}, engine(), Code.UNIMPLEMENTED, "guided.backend"),
        (
            {"structural_tag": SCHEMA},
            engine("llguidance"),
            Code.UNIMPLEMENTED,
            "guided.structural_tag",
        ),
        ({}, engine(), Code.INVALID_ARGUMENT, "guided"),
        ({"regex": ""}, engine(), Code.INVALID_ARGUMENT, "guided.regex"),
        ({"regex": "("}, engine(), Code.INVALID_ARGUMENT, "guided.regex"),
        ({"regex": "a" * MAX_GUIDE_BYTES}, engine(), Code.INVALID_ARGUMENT, "guided.regex"),
        ({"json_schema": "{"}, engine(), Code.INVALID_ARGUMENT, "guided.json_schema"),
        ({"json_schema": "[]"}, engine(), Code.INVALID_ARGUMENT, "guided.json_schema"),
        ({"json_schema": "[" * 99_999}, engine(), Code.INVALID_ARGUMENT, "guided.json_schema"),
        ({"choice": {}}, engine(), Code.INVALID_ARGUMENT, "guided.choice"),
        ({"choice": {"choices": [""]}}, engine(), Code.INVALID_ARGUMENT, "guided.choice"),
    ],
)
def test_a_guide_that_cannot_be_had_is_refused_by_name(
    guide: dict[str, Any], on: Engine, code: grpc.StatusCode, field: str
) -> None:
    with pytest.raises(RequestRefused) as caught:
        guided_params(guided(**guide), on)
    assert caught.value.status.code is code
    assert caught.value.status.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("backend", "missing"),
    [("xgrammar", set()), ("llguidance", {oe.GUIDED_DECODING_MODE_STRUCTURAL_TAG})],
)
def test_what_is_served_is_claimed(backend: str, missing: set[int]) -> None:
    said = capabilities(engine(backend))
    assert said.supported
    assert set(said.modes) == set(range(1, 7)) - missing
    nothing = capabilities(engine(None))
    assert not nothing.supported
    assert not nothing.modes
