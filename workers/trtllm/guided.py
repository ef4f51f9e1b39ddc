"""Guided decoding: the guide of a request as `GuidedDecodingParams`, for an engine with a back-end."""

import json
import re
from typing import Any

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import invalid, unsupported
from slagate.workers.trtllm.engine import Engine, setting

MAX_GUIDE_BYTES = 256 << 10
"""While the back-end compiles a guide, the engine's next step waits, with all its requests."""

_GUIDES = {
    "json_schema": oe.GUIDED_DECODING_MODE_JSON_SCHEMA,
    "regex": oe.GUIDED_DECODING_MODE_REGEX,
    "ebnf_grammar": oe.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    "structural_tag": oe.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
    "choice": oe.GUIDED_DECODING_MODE_CHOICE,
    "json_object": oe.GUIDED_DECODING_MODE_JSON_OBJECT,
}

_NOT_OF = {"llguidance": {"structural_tag"}, "xgrammar": set[str]()}
"""Guides that a back-end lacks. TensorRT-LLM has no choice guide: it is made a regular expression."""


def guides_of(engine: Engine) -> dict[str, oe.GuidedDecodingMode.ValueType]:
    """The guides that requests may have; none for an engine without a back-end."""
    backend = setting(engine.llm.args, "guided_decoding_backend")
    if backend not in _NOT_OF or getattr(engine.api, "GuidedDecodingParams", None) is None:
        return {}
    return {name: mode for name, mode in _GUIDES.items() if name not in _NOT_OF[backend]}


def capabilities(engine: Engine) -> oe.GuidedDecodingCapabilities:
    """What `GetModelInfo` says of guided decoding."""
    guides = guides_of(engine)
    return oe.GuidedDecodingCapabilities(supported=bool(guides), modes=list(guides.values()))


def guided_params(request: oe.GenerateRequest, engine: Engine) -> Any | None:
    """`GuidedDecodingParams` of a request, if it has a guide. Raises `RequestRefused` naming the field."""
    if not request.HasField("guided"):
        return None
    guides, guided = guides_of(engine), request.guided
    if not guides:
        raise unsupported("guided", "this worker has no guided decoding back-end")
    if guided.backend:
        raise unsupported("guided.backend", "the engine has one for all requests")
    guide = guided.WhichOneof("guide")
    if guide is None:
        raise invalid("guided", "has no guide")
    if guide not in guides:
        raise unsupported(f"guided.{guide}", "is not one that this worker's back-end has")
    if guided.ByteSize() > MAX_GUIDE_BYTES:
        raise invalid(f"guided.{guide}", f"is over the limit of {MAX_GUIDE_BYTES} bytes")
    try:
        return engine.api.GuidedDecodingParams(**_values(guide, guided))  # type: ignore[attr-defined]
    except ValueError as error:
        raise invalid(f"guided.{guide}", str(error)) from error


def _values(guide: str, guided: oe.GuidedDecoding) -> dict[str, Any]:
    if guide == "json_object":
        return {"json_object": True}
    if guide == "choice":
        choices = list(guided.choice.choices)
        if not choices or "" in choices:
            raise invalid("guided.choice", "must have choices, none of them empty")
        return {"regex": f"({'|'.join(map(re.escape, choices))})"}
    text = getattr(guided, guide)
    if not text:
        raise invalid(f"guided.{guide}", "must not be empty")
    if guide in ("json_schema", "structural_tag"):
        _check_json(guide, text)
    names = {"json_schema": "json", "ebnf_grammar": "grammar"}
    return {names.get(guide, guide): text}


def _check_json(guide: str, text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise invalid(f"guided.{guide}", "is not a JSON object")
