"""Checks engine arguments against the model: unknown names, types, ranges and choices."""

import math
import re
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slagate.workers.engine_args.model.merge import in_brief
from slagate.workers.engine_args.model.model import (
    POWER_OF_TWO,
    UNSET_IF_NONE,
    EngineModel,
)
from slagate.workers.engine_args.yaml_text import inline
from slagate.workers.findings import Finding, error, warning
from slagate.workers.runtime.usage import nearest

MOVED: Mapping[str, str] = {
    "tp_size": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "ep_size": "moe_expert_parallel_size",
    "expert_parallel_size": "moe_expert_parallel_size",
    "attention_dp": "enable_attention_dp",
    "enable_chunked_context": "enable_chunked_prefill",
    "use_cuda_graph": "cuda_graph_config",
    "cuda_graph_batch_sizes": "cuda_graph_config.batch_sizes",
    "cuda_graph_max_batch_size": "cuda_graph_config.max_batch_size",
    "cuda_graph_padding_enabled": "cuda_graph_config.enable_padding",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "tokens_per_block": "kv_cache_config.tokens_per_block",
    "moe_backend": "moe_config.backend",
    "moe_max_num_tokens": "moe_config.max_num_tokens",
    "moe_load_balancer": "moe_config.load_balancer",
    "enable_overlap_scheduler": "disable_overlap_scheduler",
    "max_tokens_in_buffer": "cache_transceiver_config.max_tokens_in_buffer",
    "eplb_config": "moe_config.load_balancer",
    "pytorch_backend_config": "gone, and its keys are at the top level",
}
"""Names from older engines and other tools, and keys one level too high, with what is meant."""

_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
}


class _Bound(NamedTuple):
    words: str
    limit: str  # its name in pydantic's details


_READS_AS = {
    "int_type": re.compile(r"[+-]?\d+"),
    "float_type": re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)"),
    "bool_type": re.compile(r"(?i)true|false|yes|no|on|off"),
}
"""Text that would be a value of the type without its quotes."""

_BOUNDS = {
    "greater_than": _Bound("be above", "gt"),
    "greater_than_equal": _Bound("be at least", "ge"),
    "less_than_equal": _Bound("be at most", "le"),
    "too_short": _Bound("have entries, at least", "min_length"),
}

_UNKNOWN = {
    False: "take it out, or give --allow-unknown-engine-args if the engine is newer than slagate",
    True: "it is passed on as it is; take it out if the engine does not know it either",
}


class CheckedArgs(NamedTuple):
    """The model, None where findings are in its way, and the findings."""

    model: EngineModel | None
    findings: list[Finding]


def check_values(values: Mapping[str, Any], *, allow_unknown: bool) -> CheckedArgs:
    """Check merged arguments: their model, and a finding for each name or value that is wrong.

    With `allow_unknown`, unknown names and choices are left out of the model, with a warning
    instead of an error each, and a section with an unknown name may lack required keys.
    """
    findings: list[Finding] = []
    known = _without_unknown(EngineModel, values, "", findings, allow_unknown=allow_unknown)
    for name in UNSET_IF_NONE:
        if name in known and known[name] is None:
            del known[name]
    while True:
        try:
            return CheckedArgs(EngineModel.model_validate(known), findings)
        except ValidationError as refused:
            errors = refused.errors()
        if not allow_unknown or not _leave_out_newer(errors, known, findings):
            findings += [_finding(details) for details in errors]
            return CheckedArgs(None, findings)


def _leave_out_newer(
    errors: Sequence[ErrorDetails], known: dict[str, Any], findings: list[Finding]
) -> bool:
    """Take out of `known` what only a newer engine can judge, with a warning; False if there is none."""
    unknown_in = {
        finding.place.rpartition(".")[0] for finding in findings if finding.code in ("E101", "E104")
    }
    is_any = False
    for details in errors:
        path = [str(part) for part in details["loc"]]
        is_choice = details["type"] == "literal_error"
        if details["type"] == "missing" and ".".join(path[:-1]) in unknown_in:
            path.pop()  # the keys that this kind of section needs are not known
        elif not is_choice:
            continue
        if not _take_out(known, path):
            continue
        is_any = True
        if is_choice:
            found = _finding(details)
            advice = f"it is passed on as it is; {found.advice}"
            findings.append(found._replace(severity="warning", advice=advice))
    return is_any


def _take_out(values: Any, path: Sequence[str]) -> bool:
    """Remove the value at the path; False when there is none."""
    if not path or not isinstance(values, dict) or path[0] not in values:
        return False
    if len(path) > 1:
        return _take_out(values[path[0]], path[1:])
    del values[path[0]]
    return True


def _without_unknown(
    model: type[BaseModel],
    values: Mapping[str, Any],
    prefix: str,
    findings: list[Finding],
    *,
    allow_unknown: bool,
) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        field = model.model_fields.get(key)
        if field is None:
            put = warning if allow_unknown else error
            # A key in YAML may be a number, true or null.
            advice = _advice(str(key), prefix, model) or _UNKNOWN[allow_unknown]
            findings.append(put("E101", dotted, "is no argument of TensorRT-LLM's", advice))
            continue
        section = _section_of(field.annotation)
        if section is not None and isinstance(value, Mapping):
            value = _without_unknown(
                section, value, f"{dotted}.", findings, allow_unknown=allow_unknown
            )
        known[key] = value
    return known


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section's model among the types that a field may have; None if it has none."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]
    for option in options:
        # On Python 3.10 `dict[str, int]` is an instance of `type`.
        if get_origin(option) is not None:
            continue
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _advice(key: str, prefix: str, model: type[BaseModel]) -> str | None:
    """A hint at the key that was probably meant, or None."""
    if not prefix and key in MOVED:
        return f"it is {MOVED[key]}"
    if near := nearest(key, model.model_fields, least=0.75):
        return f"did you mean {prefix}{near}?"
    places = [dotted for dotted in _all_keys(EngineModel, "") if dotted.split(".")[-1] == key]
    if places:
        return f"it belongs at {' or '.join(places)}"
    return None


def _all_keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        if (section := _section_of(field.annotation)) is not None:
            keys += _all_keys(section, f"{prefix}{name}.")
    return keys


def _finding(details: ErrorDetails) -> Finding:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    key = key.removeprefix(".")
    kind, got = details["type"], in_brief(details["input"])
    if kind == "missing":
        return error("E105", key, "is required in this section", f"set {key}")
    if kind == "literal_error":
        return error("E104", key, f"is {got}", _choice(details["loc"], details["input"]))
    if (wanted := _TYPES.get(kind)) is not None:
        advice = _type_advice(kind, key, details["input"])
        return error("E102", key, f"must be {wanted} (got {got})", advice)
    if kind == POWER_OF_TWO:
        return error("E103", key, f"must be a power of two (got {got})", "write 32, or 64")
    if (bound := _BOUNDS.get(kind)) is not None:
        limit = details["ctx"][bound.limit]
        return error("E103", key, f"must {bound.words} {limit} (got {got})", "bring it within that")
    return error("E103", key, f"is refused: {details['msg']} (got {got})", "write another value")


def _type_advice(kind: str, key: str, got: Any) -> str:
    if kind in ("dict_type", "model_type") and got is not None:
        example = ", as in backend: DEFAULT" if key == "cache_transceiver_config" else ""
        return f"write its keys below it, one a line{example}"
    if isinstance(got, str):
        # PyYAML reads YAML 1.1, in which 1e-3, without a point, is text.
        if re.fullmatch(r"[+-]?\d+[eE][+-]?\d{1,3}", got) and math.isfinite(float(got)):
            whole = kind == "int_type" and float(got).is_integer() and abs(float(got)) < 2**63
            return f"write it as {int(float(got)) if whole else inline(float(got))}"
        if kind in ("int_type", "float_type") and (
            suffixed := re.fullmatch(r"(\d+) ?([kKmMgGtT])(i?[bB])?", got)
        ):
            number = int(suffixed[1]) << (10 * ("kmgt".index(suffixed[2].lower()) + 1))
            return f"write it out, as in {number}"
        if _READS_AS.get(kind, re.compile("")).fullmatch(got.strip()):
            return "write it without quotes"
        return "write a value of that type"
    if got is None:
        return "leave the key out where the default is meant"
    if kind == "string_type" and isinstance(got, bool | int | float):
        return "write it in quotes"
    if kind == "int_type" and isinstance(got, float) and got.is_integer():
        return f"write it as {int(got)}"
    return "write a value of that type"


def _choice(loc: Sequence[int | str], got: Any) -> str:
    choices = [choice for choice in _choices(loc) if choice is not None]
    same = [choice for choice in choices if str(choice).lower() == str(got).lower()]
    near = str(same[0]) if same else nearest(str(got), map(str, choices))
    listed = ", ".join(in_brief(choice).strip('"') for choice in choices)
    return f"did you mean {near}? It is one of {listed}" if near else f"it is one of {listed}"


def _choices(loc: Sequence[int | str]) -> list[Any]:
    model: type[BaseModel] | None = EngineModel
    annotation: Any = None
    for part in loc:
        assert model is not None
        annotation = model.model_fields[str(part)].annotation
        model = _section_of(annotation)
    return _literals(annotation)


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for option in get_args(annotation) for choice in _literals(option)]
