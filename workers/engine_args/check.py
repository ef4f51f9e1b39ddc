"""Checks engine arguments by the facts of the engine's version: unknown names, types, ranges, choices."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slagate.workers.engine_args.model.facts import (
    EngineFacts,
    FactProblem,
    known_versions,
    renamed,
)
from slagate.workers.engine_args.model.merge import in_brief
from slagate.workers.engine_args.yaml_text import inline
from slagate.workers.findings import Finding, error, note, warning
from slagate.workers.runtime.usage import nearest

JUDGED_BY_ENGINE = ("E101", "E102", "E103", "E104", "E105", "E706")
"""What the engine's own model judges, and here the facts that are known of it."""

_SAID = {
    "missing": ("E105", "is required in this section", "set it"),
    "other kind": ("E706", "is of {wanted}, and the kind here is {got}", "take it out"),
    "choice": ("E104", "is {got}", ""),
    "type": ("E102", "must be {wanted} (got {got})", ""),
    "bound": ("E103", "must {wanted} (got {got})", "bring it within that"),
}
"""The code, the message and the usual advice of a problem, by its kind."""


def check_values(
    values: Mapping[str, Any], *, allow_unknown: bool, stated: EngineFacts | None = None
) -> list[Finding]:
    """The findings about merged arguments, for each name or value that is wrong.

    `stated` are the facts of the version that they are for; without it only what no known version takes is
    found. With `allow_unknown`, and for AutoDeploy, which has others, nothing is said of unknown names, and
    choices are warnings at most.
    """
    judgement = _Judgement(values, stated)
    is_lax = allow_unknown or values.get("backend") == "_autodeploy"
    text = "is not looked into: slagate has no facts about what is in it"
    unread = (stated or known_versions()[-1]).unread_sections(values)
    return [
        *judgement.findings(allow_unknown=is_lax),
        *(note("E109", one, text, "the engine judges it at its start") for one in unread),
    ]


class _Judgement:
    """What each version has against the arguments; `stated` is the one that they are for, if known."""

    def __init__(self, values: Mapping[str, Any], stated: EngineFacts | None) -> None:
        facts = {one.version: one for one in (*known_versions(), *([stated] if stated else []))}
        self._problems = {
            version: {problem.place: problem for problem in one.problems(values)}
            for version, one in facts.items()
        }
        self._judges = [stated.version] if stated else [*facts]
        self._stated = stated

    def findings(self, *, allow_unknown: bool) -> Iterator[Finding]:
        """Yields a finding for each name or value that no version takes which it may be for."""
        newest_first = [self._problems[version] for version in reversed(self._judges)]
        for place in dict.fromkeys(place for problems in newest_first for place in problems):
            told = [self._of(version, place) for version in self._judges]
            if any(problem is None for problem in told):
                continue
            known = [problem for problem in told if problem and problem.kind != "unknown"]
            if known:
                if not (known[-1].is_soft and allow_unknown):
                    yield self._of_value(known[-1], allow_unknown=allow_unknown)
            elif (problem := told[-1]) and problem.place == place and not allow_unknown:
                yield self._of_name(problem)

    def _of(self, version: str, place: str) -> FactProblem | None:
        """What the version has against this place, or against one that it is in."""
        problems = self._problems[version]
        while place and place not in problems:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return problems[place] if place else None

    def _of_value(self, problem: FactProblem, *, allow_unknown: bool) -> Finding:
        takers = [version for version in self._problems if self._of(version, problem.place) is None]
        newer = allow_unknown and problem.kind in ("choice", "missing")
        put = warning if takers or newer or problem.is_soft else error
        code, text, _ = _SAID[problem.kind]
        got = problem.got if problem.kind == "other kind" else in_brief(problem.got)
        text = text.format(wanted=problem.wanted, got=got)
        if takers and self._stated:
            text += f"; TensorRT-LLM {self._stated.version} refuses it, not {_listed(takers)}"
        return put(code, problem.place, text, _advice(problem))

    def _of_name(self, problem: FactProblem) -> Finding:
        place, key = problem.place, problem.place.rpartition(".")[2]
        having = [
            version
            for version in self._problems
            if getattr(self._of(version, place), "kind", "") != "unknown"
        ]
        stated = self._stated.version if self._stated else ""
        if having and stated:
            if having[-1] < stated:
                text = f"is not in TensorRT-LLM {stated} any more; {having[-1]} had it"
                return warning("E101", place, text, renamed().get(place, "take it out"))
            text = f"is in TensorRT-LLM {_listed(having)}, and not in {stated}"
            return warning("E101", place, text, "take it out, unless the engine is that version")
        version = f"version {stated}" if stated else "any version"
        text = f"is not known to slagate for {version} of TensorRT-LLM"
        if hint := _hint(place, key, [str(name) for name in problem.choices]):
            return warning("E101", place, text, hint)
        return note("E101", place, text, "it is passed on as it is; take it out if it is a mistake")


def _listed(versions: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(versions[:-1]), versions[-1])))


def _hint(place: str, key: str, neighbours: Sequence[str]) -> str | None:
    """What was probably meant by a name, or None."""
    if place in renamed():
        return renamed()[place]
    section = place[: -len(key)]
    near = nearest(key.lower(), neighbours, least=0.75) or next(
        (name for name in neighbours if f"_{key}_" in f"_{name}_"), None
    )
    if near:
        return f"did you mean {section}{near}?"
    places = [name for name in known_versions()[-1].fields() if name.rpartition(".")[2] == key]
    return f"it belongs at {' or '.join(places)}" if places else None


def _advice(problem: FactProblem) -> str:
    if problem.kind == "type":
        return _type_advice(problem)
    if problem.kind == "choice":
        choices, got = [str(choice) for choice in problem.choices], str(problem.got)
        same = [choice for choice in choices if choice.lower() == got.lower()]
        near = same[0] if same else nearest(got, choices)
        listed = ", ".join(choices)
        return f"did you mean {near}? It is one of {listed}" if near else f"it is one of {listed}"
    return "write 32, or 64" if "power" in problem.wanted else _SAID[problem.kind][2]


def _type_advice(problem: FactProblem) -> str:
    wanted, got = problem.wanted, problem.got
    if wanted == "a mapping" and got is not None:
        example = ", as in backend: DEFAULT" if problem.place == "cache_transceiver_config" else ""
        return f"write its keys below it, one a line{example}"
    if isinstance(got, str) and wanted in ("a whole number", "a number"):
        # PyYAML reads YAML 1.1, in which 1e3, without a point, is text.
        if re.fullmatch(r"[+-]?\d+[eE][+-]?\d{1,3}", got) and math.isfinite(float(got)):
            is_whole = float(got).is_integer() and abs(float(got)) < 2**63
            return f"write it as {int(float(got)) if is_whole else inline(float(got))}"
        if suffixed := re.fullmatch(r"(\d+) ?([kKmMgGtT])(i?[bB])?", got):
            factor = 1 << (10 * ("kmgt".index(suffixed[2].lower()) + 1))
            return f"write it out, as in {int(suffixed[1]) * factor}"
    if isinstance(got, str) and re.search(r"[{}$]", got):
        return "fill in the variable"
    if got is None:
        return "leave the key out where the default is meant"
    if wanted == "text" and isinstance(got, bool | int | float):
        return "write it in quotes"
    return "write a value of that type"
