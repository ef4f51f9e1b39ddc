"""The keys of a fleet file by stage, and the other spellings of them that are read."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class AxisKeys(NamedTuple):
    """The keys of one axis in a strategy, which has `edges`, or `low`, `high` and `resolution`."""

    field: str
    low: str
    high: str
    resolution: str
    edges: str
    optional: bool = False

    @property
    def even(self) -> tuple[str, str, str]:
        """The keys of an axis with bands of equal width."""
        return self.low, self.high, self.resolution


class StageKeys(NamedTuple):
    """The keys of one stage in the file."""

    stage: str
    pool_count: str
    names: str
    short_names: str
    priorities: str
    strategy: str
    mapping: str
    axes: tuple[AxisKeys, ...]

    @property
    def top(self) -> tuple[str, ...]:
        """The keys of the stage at the top level."""
        return self.pool_count, self.names, self.short_names, self.priorities, self.strategy

    @property
    def deprecated(self) -> Mapping[str, str]:
        """Old key to current key: Dynamo's latency bounds once had no unit in their names."""
        bounds = [key for axis in self.axes for key in axis.even[:2] if key.endswith("_ms")]
        return {key.removesuffix("_ms"): key for key in bounds}


def _size(name: str, *, optional: bool = False) -> AxisKeys:
    bounds = f"{name}_min", f"{name}_max", f"{name}_resolution"
    return AxisKeys(name, *bounds, f"{name}_edges", optional)


def _latency(name: str) -> AxisKeys:
    bounds = f"{name}_min_ms", f"{name}_max_ms", f"{name}_resolution"
    return AxisKeys(f"{name}_ms", *bounds, f"{name}_edges_ms")


def _stage(name: str, *axes: AxisKeys) -> StageKeys:
    pool = f"{name}_pool"
    return StageKeys(
        stage=name,
        pool_count=f"num_{pool}s",
        names=f"{pool}_dynamo_namespaces",
        short_names=f"{pool}s",
        priorities=f"{pool}_priorities",
        strategy=f"{pool}_selection_strategy",
        mapping=f"{pool}_mapping",
        axes=axes,
    )


PREFILL = _stage("prefill", _size("isl"), _latency("ttft"))
DECODE = _stage("decode", _size("context_length"), _latency("itl"))
AGG = _stage("agg", _size("isl", optional=True), _latency("ttft"), _latency("itl"))

STAGES: Mapping[str, Mapping[str, StageKeys]] = {
    "disagg": {"prefill": PREFILL, "decode": DECODE},
    "agg": {"agg": AGG},
    "prefill": {"prefill": PREFILL},
}
"""The stages of each mode. A file of Dynamo's endpoint picker alone is half a fleet, of mode "prefill"."""

OVERRIDES = "priority_overrides"
CHAIN = "routing_priority"
"""The key of a Dynamo pull request for the pools to try in order; lists in cells say that here."""

# Dynamo's endpoint picker for the Gateway API inference extension ("EPP") has the prefill grid in a flat
# object with camelCase keys.
EPP_LABEL = "poolLabel"
"""The key for the label of an endpoint that names its pool; it has no meaning here."""
EPP_KEYS: Mapping[str, tuple[str, ...]] = {
    "poolLabels": (PREFILL.names,),
    "sizeMin": (PREFILL.strategy, "isl_min"),
    "sizeMax": (PREFILL.strategy, "isl_max"),
    "sizeResolution": (PREFILL.strategy, "isl_resolution"),
    "latencyMinMs": (PREFILL.strategy, "ttft_min_ms"),
    "latencyMaxMs": (PREFILL.strategy, "ttft_max_ms"),
    "latencyResolution": (PREFILL.strategy, "ttft_resolution"),
    "mapping": (PREFILL.strategy, PREFILL.mapping),
    "priorityOverrides": (PREFILL.strategy, OVERRIDES),
}
EPP_RULE_KEYS: Mapping[str, str] = {
    "minPriority": "min_priority",
    "maxPriority": "max_priority",
    "targetPool": "target_pool",
}
EPP_ZEROS = ("sizeMin", "latencyMinMs")
"""Keys that default to 0, as in Go; so do those of a rule."""


class Form(NamedTuple):
    """The form of a fleet file: its mode, and whose keys it has."""

    mode: str
    epp: bool  # the prefill stage has the keys of the endpoint picker

    @property
    def stages(self) -> Iterable[StageKeys]:
        """The keys of each stage that a file of this form has."""
        return STAGES[self.mode].values()


def form_of(content: Mapping[str, object]) -> Form:
    """The form of a file by its mode and keys; with an invalid mode, the form of most of its keys."""
    own = {PREFILL.pool_count, PREFILL.names, PREFILL.short_names, PREFILL.strategy}
    epp_keys = {*EPP_KEYS, EPP_LABEL}
    mode = content.get("mode")
    # A single such key may be an error in a file of another form.
    epp = mode != "agg" and len(epp_keys & content.keys()) > 1 and not own & content.keys()
    if mode == "agg" or (mode == "disagg" and not epp):
        return Form(mode, epp=False)
    if epp:
        has_decode = mode is not None or any(key in content for key in DECODE.top)
        return Form("disagg" if has_decode else "prefill", epp=True)
    if "mode" not in content:
        return Form("disagg", epp=False)
    n_keys = {
        name: sum(key in content for keys in STAGES[name].values() for key in keys.top)
        for name in ("disagg", "agg")
    }
    return Form(max(n_keys, key=lambda name: n_keys[name]), epp=False)
