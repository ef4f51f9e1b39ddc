"""The spec that a grid is built from: a file with the pools of each stage and the axes of their grids.

It is read here, and checked with `spec_rules` and the timing profiles that it names. docs/build.md is the
page for operators.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from slagate.pools.fleet_file.models import (
    Address,
    Array,
    Count,
    Limit,
    Maybe,
    Name,
    Number,
    Objective,
    Scheduling,
    Word,
)
from slagate.pools.fleet_file.rules import read_profiles
from slagate.pools.fleet_file.validation import problems as found_by_pydantic
from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.grid.json_text import ROOT, json_path, read_json, shown
from slagate.pools.grid_build.spec_rules import contradictions
from slagate.workers.profiles.profile import TpProfile


def _point(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise PydanticCustomError("point", "must be a pair [tokens, ms]")
    return tuple(value)


Point = Annotated[tuple[Number, Number | None], BeforeValidator(_point)]
Share = Annotated[float, Field(strict=False, ge=0.0, lt=1.0)]


class _SpecObject(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AxisSpec(_SpecObject):
    """The bands of one axis: `edges`, or `resolution` equal ones from `min` to `max`.

    `beyond` is whether requests outside of them can come too (larger sizes, tighter targets).
    """

    min: Maybe[Number] = None
    max: Maybe[Number] = None
    resolution: Maybe[Annotated[int, Field(ge=1, le=10_000)]] = None
    edges: Maybe[Array[Number]] = None
    beyond: bool = True


class PoolBuildSpec(_SpecObject):
    """One pool: its cost, its speed, and its other keys of a fleet file.

    Speed is a timing profile, or curves of [tokens, ms]: TTFT of one prompt on an idle worker over ISL,
    ITL under the planned load over context (agg: over ISL). `cost` is GPUs per worker, `batch` how many
    requests its engine runs at once.
    """

    name: Name
    tp: Maybe[Count] = None
    replicas: Maybe[Count] = None
    cost: Maybe[Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)]] = None
    profile: Maybe[Word] = None
    ttft_curve: Maybe[Array[Point]] = None
    itl_curve: Maybe[Array[Point]] = None
    workers: Array[Address] = ()
    batch: Maybe[Limit] = None
    max_inflight: Maybe[Limit] = None
    max_queued_tokens: Maybe[Limit] = None

    @property
    def gpus(self) -> float:
        """What one worker costs, in GPUs: `cost`, else `tp`, else 1."""
        return self.cost if self.cost is not None else float(self.tp or 1)

    @property
    def planned_workers(self) -> int:
        """How many workers the plan counts with: `replicas`, else those listed, else 1."""
        return self.replicas or len(self.workers) or 1


class TrafficSpec(_SpecObject):
    """Mean tokens of prompts and answers; squared coefficient of variation of prompts' times."""

    isl: Maybe[Count] = None
    osl: Count = 256
    service_variability: Annotated[float, Field(strict=False, ge=0.0, allow_inf_nan=False)] = 0.0


class StageSpec(_SpecObject):
    """The pools of one stage; each kind of stage adds the axes of its grid."""

    pools: Annotated[Array[PoolBuildSpec], Field(min_length=1)]


class PrefillSpec(StageSpec):
    """The prefill pools and their grid."""

    isl: AxisSpec
    ttft_ms: AxisSpec


class DecodeSpec(StageSpec):
    """The decode pools and their grid."""

    context_length: AxisSpec
    itl_ms: AxisSpec


class AggSpec(StageSpec):
    """The pools that do both phases, and their grid, which has two axes without `isl`."""

    isl: Maybe[AxisSpec] = None
    ttft_ms: AxisSpec
    itl_ms: AxisSpec


class _Spec(_SpecObject):
    utilisation: Share = 0.7
    margin: Share = 0.0
    enable_priority_retry: bool = False
    scheduling: Scheduling = Scheduling()
    traffic: TrafficSpec = TrafficSpec()
    objectives: dict[str, Objective] = {}


class DisaggBuildSpec(_Spec):
    """A spec of prefill pools and decode pools."""

    mode: Literal["disagg"] = "disagg"
    prefill: PrefillSpec
    decode: DecodeSpec


class AggBuildSpec(_Spec):
    """A spec of pools that do both phases."""

    mode: Literal["agg"]
    agg: AggSpec


BuildSpec = DisaggBuildSpec | AggBuildSpec
_SPECS: Mapping[str, type[DisaggBuildSpec] | type[AggBuildSpec]] = {
    "disagg": DisaggBuildSpec,
    "agg": AggBuildSpec,
}
STAGES = {"disagg": ("prefill", "decode"), "agg": ("agg",)}
AXES = {
    "prefill": ("isl", "ttft_ms"),
    "decode": ("context_length", "itl_ms"),
    "agg": ("isl", "ttft_ms", "itl_ms"),
}


def stages_of(spec: BuildSpec) -> dict[str, StageSpec]:
    """The parts of a spec by stage: "prefill" and "decode", or "agg"."""
    return {stage: getattr(spec, stage) for stage in STAGES[spec.mode]}


def parse_spec(text: str, source: str) -> BuildSpec:
    """Parse and check a spec, its profiles too. Raises `ConfigError`: all problems of `source`."""
    content, problem, repeated = read_json(text)
    if problem is not None:
        raise ConfigError(source, [problem])
    if not isinstance(content, dict):
        raise ConfigError(source, [Problem(ROOT, f"must be an object (got {shown(content)})")])
    problems = [Problem(json_path(path), "is given more than once, keep one") for path in repeated]
    if "num_prefill_pools" in content or "num_agg_pools" in content:
        problems.append(Problem(ROOT, "looks like a fleet file, which is what is made of a spec"))
    mode = content.get("mode", "disagg")
    if not isinstance(mode, str) or mode not in _SPECS:
        problems.append(Problem("mode", f'must be "disagg" or "agg" (got {shown(mode)})'))
        mode = "agg" if "agg" in content else "disagg"
        content = {**content, "mode": mode}
    spec = None
    try:
        spec = _SPECS[mode].model_validate(content)
    except ValidationError as error:
        problems += found_by_pydantic(error, _keys(mode))
    # Rules come last: for a place that cannot be read the earlier message is better.
    problems += contradictions(content, STAGES[mode], AXES)
    problems += profile_problems(content, STAGES[mode])
    by_path: dict[str, Problem] = {}
    for problem in problems:
        by_path.setdefault(problem.path, problem)
    if by_path or spec is None:
        raise ConfigError(source, list(by_path.values()))
    return spec


def _keys(mode: str) -> dict[str, Iterable[str]]:
    models: dict[str, type[BaseModel]] = {
        "": _SPECS[mode],
        "traffic": TrafficSpec,
        "scheduling": Scheduling,
        "prefill": PrefillSpec,
        "decode": DecodeSpec,
        "agg": AggSpec,
        "pools": PoolBuildSpec,
        "objectives": Objective,
        **{name: AxisSpec for axes in AXES.values() for name in axes},
    }
    return {name: model.model_fields for name, model in models.items()}


def stage_profiles(
    stage: str, named: Mapping[int, tuple[str, int | None]]
) -> tuple[dict[int, TpProfile], list[Problem]]:
    """Read the profiles of a stage: by number of the pool in the spec, and problems.

    `named` has the name or path of a profile and its tensor parallel size. A size of None was
    refused already: the pool gets no profile, and a problem only where that cannot be read.
    """
    found, faults = read_profiles({str(at): value for at, value in named.items()})
    problems = [
        Problem(json_path((stage, "pools", int(at), key)), f"{reason} (got {shown(got)})")
        for (_, at, key), reason, got in faults
    ]
    return {int(at): profile for at, profile in found.items()}, problems


def profile_problems(content: Mapping[str, Any], stages: Sequence[str]) -> list[Problem]:
    """The problems of profiles that a spec names, read from disk; malformed pools are skipped."""
    problems = []
    for stage in stages:
        part = content.get(stage)
        pools = part.get("pools") if isinstance(part, dict) else None
        named = {}
        for at, pool in enumerate(pools if isinstance(pools, list) else ()):
            if isinstance(pool, dict) and isinstance(pool.get("profile"), str):
                tp = pool.get("tp")
                is_size = isinstance(tp, int) and not isinstance(tp, bool) and tp > 0
                named[at] = (pool["profile"], tp if is_size else None)
        problems += stage_profiles(stage, named)[1]
    return problems
