"""`slagate worker facts`: what an installed engine's arguments may be, as a file; and what differs.

Exit status 0, or 2 where something cannot be read.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from typing_extensions import override

from slagate.router.cli.command import ending_on_usage_error, fail, until_reader_leaves
from slagate.workers.engine_args.model.facts import BOUNDS, TYPES, EngineFacts, read_facts
from slagate.workers.trtllm.package import load_package, set_engine_log_level

_NAMED = ("$defs", "default", "mapping", "properties")
"""Keys of a schema whose values have names of their own."""
_KEPT = {
    *("$ref", "additionalProperties", "anyOf", "const", "discriminator", "enum", "items", "oneOf"),
    *("propertyName", "required", "type", "x-aliases", *_NAMED, *BOUNDS),
}


def facts(
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write those of the installed TensorRT-LLM here."),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Say what differs: each a version, or such a file."),
    ] = None,
) -> None:
    """Write what the installed engine may be given, or say what differs between two versions."""
    if (out is None) == (diff is None):
        fail("--out or --diff is missing: a file to write, or two versions to compare")
    with ending_on_usage_error():
        if diff is not None:
            lines = difference(*(read_facts(one, "--diff") for one in diff))
            with until_reader_leaves():
                print("\n".join(lines or ["nothing differs"]))
            return
        set_engine_log_level("warning", os.environ)
        package = load_package()
        if package.TorchLlmArgs is None:
            fail(f"tensorrt_llm {package.version} has no TorchLlmArgs that says its arguments")
    text = facts_as_json(package.TorchLlmArgs, package.version)
    assert out is not None
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--out: {out}: {error.strerror or error}")


class _Facts(GenerateJsonSchema):
    """The schema of a model, whatever types it has, with all names of its fields."""

    @override
    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}

    @override
    def model_field_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().model_field_schema(schema)
        alias = schema.get("validation_alias")
        is_list = isinstance(alias, list)
        return {**made, "x-aliases": [path[0] for path in alias[1:]]} if is_list else made


def facts_as_json(model: type[BaseModel], version: str) -> str:
    """The facts of an installed package's own model, as the text of a file."""
    schema = _bare(model.model_json_schema(by_alias=False, schema_generator=_Facts))
    source = f"{model.__module__}.{model.__qualname__} of tensorrt_llm {version}, as installed"
    return json.dumps({"version": version, "source": source, "schema": schema}, indent=1) + "\n"


def _bare(schema: Any, *, is_named: bool = False) -> Any:
    """A schema without descriptions, and without types that are none of JSON's."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _bare(one, is_named=key in _NAMED and not is_named)
        for key, one in schema.items()
        if is_named or (key in _KEPT and not (key == "type" and one not in TYPES))
    }


def difference(older: EngineFacts, newer: EngineFacts) -> list[str]:
    """What differs between two versions, a line for each field: + came, - went, ~ changed."""
    before, after = (
        {name: json.dumps(schema, sort_keys=True) for name, schema in one.fields().items()}
        for one in (older, newer)
    )
    lines = {name: f"- {name}" for name in before if name not in after}
    for name, schema in after.items():
        if name not in before:
            lines[name] = f"+ {name}: {schema}"
        elif before[name] != schema:
            lines[name] = f"~ {name}: {before[name]} -> {schema}"
    return [lines[name] for name in sorted(lines)]
