"""Reads a fleet file into grids. All problems are found here, at once, and none at request time."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel

from slagate.pools.fleet_file.check import CheckOptions, checked
from slagate.pools.fleet_file.disguise import in_brief, unfilled, what_is_around, what_text_is
from slagate.pools.fleet_file.keys import STAGES, AxisKeys, StageKeys
from slagate.pools.fleet_file.models import AggFile, Objective, PoolSpec, PrefillFile, Scheduling
from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.grid.grid import Axis, PriorityRule, StageGrid, UnevenAxis
from slagate.pools.grid.json_text import ROOT, ReadJson, read_json, shown
from slagate.workers.profiles.profile import TpProfile


def stage_grid(file: PrefillFile | AggFile, keys: StageKeys, *, epp: bool) -> StageGrid:
    """The grid of one stage of a valid file; with `epp` as the endpoint picker understands it."""
    strategy = getattr(file, keys.strategy)
    names: tuple[str, ...] = getattr(file, keys.names)
    axes = [axis for each in keys.axes if (axis := _axis(strategy, each, doubles=epp)) is not None]
    entries: list[object] = list(getattr(strategy, keys.mapping))
    for _ in axes[1:]:
        entries = [entry for row in entries for entry in row]  # type: ignore[attr-defined]
    priorities: tuple[int, ...] | None = getattr(file, keys.priorities)
    return StageGrid(
        axes=tuple(axes),
        cells=tuple(_cell(entry, names) for entry in entries),
        pool_names=names,
        priorities=tuple(range(len(names))) if priorities is None else priorities,
        rules=tuple(
            PriorityRule(rule.min_priority, rule.max_priority, _number(rule.target_pool, names))
            for rule in strategy.priority_overrides
        ),
        retry=file.enable_priority_retry,
        size_optional=any(axis.optional for axis in keys.axes),
        negative_is_none=epp,
        spill=file.scheduling.spill,
        costs=tuple(file.pools.get(name, PoolSpec()).gpus for name in names),
    )


def _axis(strategy: BaseModel, keys: AxisKeys, *, doubles: bool) -> Axis | UnevenAxis | None:
    edges = getattr(strategy, keys.edges)
    if edges is not None:
        return UnevenAxis(keys.field, edges)
    low, high, resolution = (getattr(strategy, key) for key in keys.even)
    if low is None:
        return None
    if doubles:
        low, high = float(low), float(high)
    return Axis(keys.field, low, high, resolution)


def _cell(entry: object, names: tuple[str, ...]) -> tuple[int, ...]:
    if isinstance(entry, list | tuple):
        return tuple(_number(pool, names) for pool in entry)
    return (_number(entry, names),)


def _number(pool: object, names: tuple[str, ...]) -> int:
    if isinstance(pool, str):
        return names.index(pool)
    assert isinstance(pool, int), "the file's rules let nothing else pass"
    return pool


UNREACHED = "no cell, override or retry leads to this pool"
"""The end of the warning about a pool that no request can reach."""


_NOTHING = ReadJson(None, None, ())


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet file that passed every check.

    `stages` has "prefill" and "decode" in mode disagg, "agg" in mode agg; a file of Dynamo's endpoint
    picker alone has mode "prefill" and that stage. `warnings` are lines to show to the operator. `ignored`
    has the paths of unknown keys that were left out. `text` is the content as canonical JSON, without what
    was ignored and with what other sources gave. `profiles` are by pool, of those that name one; None: it
    was not loaded for serving.
    """

    source: str
    text: str
    mode: str
    stages: Mapping[str, StageGrid]
    pools: Mapping[str, PoolSpec]
    objectives: Mapping[str, Objective]
    scheduling: Scheduling
    warnings: tuple[str, ...]
    ignored: tuple[str, ...]
    profiles: Mapping[str, TpProfile] | None


def load_config(
    path: str | os.PathLike[str],
    *,
    lenient: bool = False,
    pools: str | os.PathLike[str] | None = None,
    workers: Mapping[str, Sequence[str]] = MappingProxyType({}),
    serving: bool = False,
    text: str | None = None,
) -> FleetConfig:
    """Load the fleet file at `path`. Raises `ConfigError` when it cannot be read or used.

    The `pools` section of the file `pools` overrides the fleet file's, and `workers`, addresses by
    pool, override both. With `lenient` unknown keys are left out. With `serving` each pool must
    have workers, and profiles are read. `text` is used in place of the content of the file.
    """
    source = os.fspath(path)
    problems: list[Problem] = []
    read = _read(path, "", problems, text)
    more = _NOTHING if pools is None else _read(pools, f"{os.fspath(pools)}: ", problems)
    if problems:
        raise ConfigError(source, problems)
    extras = CheckOptions(
        lenient=lenient,
        serving=serving,
        repeated=read.repeated,
        pools_name=None if pools is None else os.fspath(pools),
        pools=more,
        workers=workers,
    )
    return _parsed(read.value, source, extras)


def parse_config(
    obj: object, *, source: str, lenient: bool = False, serving: bool = False
) -> FleetConfig:
    """Check parsed JSON as a fleet file, which errors call `source`. Raises `ConfigError`."""
    return _parsed(obj, source, CheckOptions(lenient=lenient, serving=serving))


def _read(
    path: str | os.PathLike[str], prefix: str, problems: list[Problem], text: str | None = None
) -> ReadJson:
    """The JSON in a file, or in `text` if given; a problem is appended."""
    try:
        text = Path(path).read_text(encoding="utf-8") if text is None else text
        value, problem, repeated = read_json(text)
        reason = None if problem is None else what_text_is(text) or problem.message
    except UnicodeDecodeError:
        reason = "cannot be read: save it as UTF-8"
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        reason = f"cannot be read: {getattr(error, 'strerror', error)}"
    if reason is not None:
        problems.append(Problem(f"{prefix}{ROOT}", reason))
        return _NOTHING
    return ReadJson(value, None, repeated)


def _parsed(content: object, source: str, extras: CheckOptions) -> FleetConfig:
    around = what_is_around(content)
    if around is not None or not isinstance(content, dict):
        reason = around or f"must be an object (got {shown(content)})"
        raise ConfigError(source, [Problem(ROOT, reason)])
    found = checked(content, extras)
    report, file = found.report, found.file
    problems, gap = report.problems(), unfilled(content)
    if problems and any(
        isinstance(stage := content.get(name), dict) and "pools" in stage
        for name in ("prefill", "decode", "agg")
    ):
        reason = "looks like a spec, of which slagate grid build makes a fleet file"
        problems.insert(0, Problem(ROOT, reason))
    if problems or file is None:
        raise ConfigError(source, in_brief(problems, gap))
    if gap is not None:
        report.warnings.append(str(gap))
    stages = {
        stage: stage_grid(file, keys, epp=found.form.epp and stage == "prefill")
        for stage, keys in STAGES[found.form.mode].items()
    }
    for stage, keys in STAGES[found.form.mode].items():
        reached = stages[stage].reached()
        for at in range(len(stages[stage].pool_names)):
            if at not in reached:
                report.warn((keys.names, at), UNREACHED)
    return FleetConfig(
        source=source,
        text=json.dumps(found.kept, separators=(",", ":"), sort_keys=True),
        mode=found.form.mode,
        stages=MappingProxyType(stages),
        pools=MappingProxyType(file.pools),
        objectives=MappingProxyType(file.objectives),
        scheduling=file.scheduling,
        warnings=tuple(report.warnings),
        ignored=tuple(report.ignored),
        profiles=None if found.profiles is None else MappingProxyType(found.profiles),
    )
