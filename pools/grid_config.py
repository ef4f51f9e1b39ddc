"""Reading a fleet file: every problem is found here, all of them at once, and none at request time."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from slagate.pools.errors import ConfigError, Problem
from slagate.pools.grid import Axis, PriorityRule, StageGrid
from slagate.pools.grid_draft import ABSENT, Draft
from slagate.pools.grid_file import FILES, STAGES, AggFile, DisaggFile, PoolSpec, StageKeys
from slagate.pools.grid_hints import unknown_key
from slagate.pools.grid_rules import check_rules
from slagate.pools.json_text import ROOT, json_path, read_json, shown

# pydantic's kinds of error, in words for someone who edits a file. Our own kinds bring theirs.
_REASONS = {
    "missing": "is required",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must have keys of valid Unicode",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "invalid_key": "must have string keys",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet file that passed every check.

    `stages` has "prefill" and "decode" in mode disagg, "agg" in mode agg. `warnings` are lines to show to
    the operator, one for each deprecated key. `text` is the content as JSON, the same for the same content.
    """

    source: str
    text: str
    mode: str
    stages: Mapping[str, StageGrid]
    pools: Mapping[str, PoolSpec]
    warnings: tuple[str, ...]


def load_config(path: str | os.PathLike[str]) -> FleetConfig:
    """The fleet file at `path`. Raises `ConfigError` when it cannot be read or used."""
    source = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(source, [Problem(ROOT, f"cannot be read: {error.strerror}")]) from error
    except ValueError as error:  # not UTF-8, or a path with a NUL in it
        raise ConfigError(source, [Problem(ROOT, f"cannot be read: {error}")]) from error
    content, problems = read_json(text)
    if problems and content is None:
        raise ConfigError(source, problems)
    return _parsed(content, source, problems)


def parse_config(obj: object, *, source: str) -> FleetConfig:
    """The fleet file with the content `obj`; `source` names it. Raises `ConfigError`."""
    return _parsed(obj, source, ())


def require_workers(config: FleetConfig) -> None:
    """Check that the pools of the grids and those with workers are the same.

    Raises `ConfigError` for a pool without workers, workers of no pool, and an address given twice.
    """
    problems: list[Problem] = []
    grid_pools = {name: key for key, grid in config.stages.items() for name in grid.pool_names}
    for name, stage in grid_pools.items():
        if name not in config.pools:
            reason = f"is required, as a {stage} pool has this name (got nothing)"
            problems.append(Problem(json_path(("pools", name)), reason))
        elif not config.pools[name].workers:
            reason = "must not be empty (got [])"
            problems.append(Problem(json_path(("pools", name, "workers")), reason))
    first_place: dict[str, str] = {}
    for name, spec in config.pools.items():
        if name not in grid_pools:
            reason = f"is not one of the pools {', '.join(grid_pools)} (got {shown(name)})"
            problems.append(Problem(json_path(("pools", name)), reason))
        for at, address in enumerate(spec.workers):
            place = json_path(("pools", name, "workers", at))
            first = first_place.setdefault(address.lower(), place)
            if first != place:
                problems.append(Problem(place, f"is at {first} already (got {shown(address)})"))
    if problems:
        raise ConfigError(config.source, problems)


def _parsed(content: object, source: str, read_problems: tuple[Problem, ...]) -> FleetConfig:
    draft = Draft(content)
    file = _checked(draft)
    # What the reader said about a place is the better message, and which of two values of a repeated
    # key would be meant is open.
    said = {problem.path for problem in read_problems}
    problems = [*read_problems, *(p for p in draft.problems() if p.path not in said)]
    if problems or file is None:
        raise ConfigError(source, problems)
    stages = {
        stage: _stage_grid(file, keys, retry=file.enable_priority_retry)
        for stage, keys in STAGES[file.mode].items()
    }
    return FleetConfig(
        source=source,
        text=json.dumps(content, separators=(",", ":"), sort_keys=True),
        mode=file.mode,
        stages=MappingProxyType(stages),
        pools=MappingProxyType(file.pools),
        warnings=tuple(draft.warnings),
    )


def _checked(draft: Draft) -> DisaggFile | AggFile | None:
    """The file, or None when `draft` says why not."""
    content = draft.content
    if not isinstance(content, dict):
        draft.refuse((), "must be an object", content)
        return None
    mode = content.get("mode", "disagg")
    if not isinstance(mode, str) or mode not in FILES:
        draft.refuse(("mode",), 'must be "disagg" or "agg"', mode)
        # The rest is checked as what it looks like, so that a typing error here hides no other.
        keys = set(content)
        mode = max(FILES, key=lambda name: len(keys & FILES[name].model_fields.keys()))
        content = {**content, "mode": mode}
    file = None
    try:
        file = FILES[mode].model_validate(content)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            kind, path = item["type"], item["loc"]
            if kind == "extra_forbidden":
                reason = unknown_key(path, mode)
            else:
                known = _REASONS.get(kind)
                reason = known.format(**item.get("ctx", {})) if known else item["msg"]
            draft.refuse(path, reason, ABSENT if kind == "missing" else item["input"])
    check_rules(draft, mode)
    return file


def _stage_grid(file: DisaggFile | AggFile, keys: StageKeys, *, retry: bool) -> StageGrid:
    strategy = getattr(file, keys.strategy)
    names: tuple[str, ...] = getattr(file, keys.names)
    axes = [
        Axis(axis.field, *(getattr(strategy, key) for key in axis[1:]))
        for axis in keys.axes
        if getattr(strategy, axis.low) is not None
    ]
    cells: Any = getattr(strategy, keys.mapping)
    for _ in axes[1:]:
        cells = [entry for entries in cells for entry in entries]
    priorities: tuple[int, ...] | None = getattr(file, keys.priorities)
    return StageGrid(
        axes=tuple(axes),
        cells=tuple(cells),
        pool_names=names,
        priorities=tuple(range(len(names))) if priorities is None else priorities,
        rules=tuple(
            PriorityRule(rule.min_priority, rule.max_priority, rule.target_pool)
            for rule in strategy.priority_overrides
        ),
        retry=retry,
    )
