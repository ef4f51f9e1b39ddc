"""The form of most rules: a row of what is said of an engine's arguments, and when."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pydantic import BaseModel

from slagate.workers.engine_args.model.merge import in_brief
from slagate.workers.engine_args.rules.case import EngineCase, Version
from slagate.workers.findings import Finding, error, note, warning

_PUT = {"error": error, "warning": warning, "note": note}


class RuleRow(NamedTuple):
    """One rule. Its words are templates over `{value}`, the key's, `{args}`, all, and `{case}`."""

    head: str
    """Severity, code and key, as in "error E405 pp_partition"."""
    is_there: Callable[[EngineCase], object]
    """True where the finding is to be made."""
    text: str
    advice: str
    since: Version | None = None
    """The version that began to refuse it; None: all that were read do."""
    before: Version | None = None
    """The version that no longer refuses it; None for none."""


def check_rows(rows: tuple[RuleRow, ...], case: EngineCase) -> Iterator[Finding]:
    """Yields the finding of each row that is there; errors of other versions than the case's are warnings.

    There is none if the version is known to be one that no longer refuses it.
    """
    for row in rows:
        severity, code, key = row.head.split()
        refused = case.is_within(row.since, row.before)
        is_over = refused is False and (row.before is not None or severity != "error")
        if is_over or not row.is_there(case):
            continue
        value = value_at(case, key)
        shown = "there" if isinstance(value, BaseModel) else in_brief(value)
        words = {"value": shown, "args": case.args, "case": case}
        text, advice = row.text.format(**words), row.advice.format(**words)
        if not refused and row.since is not None:
            number = "{}.{}".format(*row.since)
            text += f": TensorRT-LLM {number} refuses that, and earlier ones start with it"
        elif not refused and row.before is not None:
            number = "{}.{}".format(*row.before)
            text += f" (TensorRT-LLM before {number})"
            advice += ", or say --engine-version"
        severity = "warning" if severity == "error" and not refused else severity
        yield _PUT[severity](code, key, text, advice)


def value_at(case: EngineCase, key: str) -> object:
    """The value of a dotted key, or its default; None where its section is missing."""
    value: object = case.args
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value
