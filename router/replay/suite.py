"""A suite: which runs to make, from a file of these keys or from the options that mean the same."""

from collections.abc import Collection, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from slagate.pools.fleet_file.load import load_config
from slagate.pools.fleet_file.models import (
    Array,
    Count,
    Maybe,
    Positive,
    TargetMs,
    Word,
    is_number,
    must,
)
from slagate.pools.fleet_file.validation import problems
from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.grid.json_text import ROOT, json_path, shown
from slagate.router.replay.classes import (
    Classes,
    RequestClass,
    contradictions,
    drawn,
    drawn_tenant,
    read_file,
)
from slagate.router.replay.client import Ask
from slagate.router.replay.fleet import IDEAL, REAL, Imperfection, Slow
from slagate.router.replay.policies.registry import NAMES, make
from slagate.router.replay.trace import TraceRow, arrival_s
from slagate.workers.runtime.usage import UsageError, nearest
from slagate.workers.sim.args import VOCAB_SIZE

MAX_RANKS = 8
"""Of a worker: the GPUs of one machine."""

_SHARE = must("must be a number above 0, and at most 1", lambda v: is_number(v) and 0 < v <= 1)


class Suite(BaseModel):
    """Every policy on every trace and fleet, at every load, with every seed.

    A suite file has the same keys. `traces` and `fleets` are paths, which a file gives as names. `ranks` is
    how many attention-DP ranks each worker of a pool has, `tenants` how many tenants a class has, which
    share its conversations. With `find_rate` the highest load is looked for at which so large a share of
    the feasible requests meets both targets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    traces: Annotated[Array[Word], Field(min_length=1)]
    fleets: Annotated[Array[Word], Field(min_length=1)]
    classes: Classes
    policies: Annotated[Array[Word], Field(min_length=1)]
    loads: Annotated[Array[Positive], Field(min_length=1)]  # 1: as fast as in the trace
    seeds: Annotated[Array[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    requests: Count
    skip: Annotated[int, Field(ge=0)] = 0  # rows of the trace
    parameters: dict[str, dict[str, Any]] = {}
    find_rate: Maybe[Annotated[float, PlainValidator(_SHARE)]] = None
    slow: Maybe[Slow] = None
    prediction_noise: TargetMs = 0.0  # `Imperfection.prediction_noise`
    ranks: dict[str, Annotated[int, Field(ge=1, le=MAX_RANKS)]] = {}
    tenants: dict[str, Count] = {}
    ideal: bool = False

    @property
    def imperfection(self) -> Imperfection:
        """What the runs' fleets meet. What the suite asks for by name is there in ideal runs too."""
        usual = IDEAL if self.ideal else REAL
        return usual._replace(slow=self.slow, prediction_noise=self.prediction_noise)

    def asks(self, rows: Sequence[TraceRow], *, load: float, seed: int) -> list[Ask]:
        """The requests of a run: one for each row, as its client sends it."""
        asks = []
        for row, at_s in zip(rows, arrival_s(rows, load), strict=True):
            sla = drawn(self.classes, seed, row.conversation)
            n_tenants, n_tokens = self.tenants.get(sla.name), row.osl_tokens
            if self.ideal:
                n_tokens = min(n_tokens, sla.max_tokens)
            asks.append(
                Ask(
                    row,
                    sla,
                    at_s,
                    row.prompt(VOCAB_SIZE),
                    answer_tokens=n_tokens,
                    max_tokens=n_tokens if self.ideal else sla.max_tokens,
                    ignore_eos=self.ideal,
                    tenant=drawn_tenant(sla, n_tenants, seed, row.conversation)
                    if n_tenants
                    else "",
                )
            )
        return asks


_KEYS = {"": Suite.model_fields, "classes": RequestClass._fields, "slow": Slow._fields}


def packaged_suites() -> tuple[str, ...]:
    """The names of the suites that come along, sorted."""
    return tuple(sorted(path.stem for path in _packaged().glob("*.json")))


def load_suite(name_or_path: str | Path, traces: Path | None = None) -> Suite:
    """The suite of this name that comes along, or else the file at a path with `/` or `.json`.

    Its traces are looked for in the folder `traces`, then in `traces` beside the file, its fleet files
    beside it. Raises `ConfigError` with all problems of the file, and `UsageError` for a name that no suite
    has.
    """
    text = str(name_or_path)
    path = Path(text)
    if "/" not in text and not text.endswith(".json"):
        if text not in packaged_suites():
            known = ", ".join(packaged_suites())
            raise UsageError(f"suite {text!r} does not come along; there are {known}")
        path = _packaged() / f"{text}.json"
    beside = [path.parent / "traces"]
    return parse_suite(
        read_file(path),
        source=str(path),
        traces=beside if traces is None else [traces, *beside],
        fleets=path.parent,
    )


def parse_suite(
    content: object,
    *,
    source: str,
    traces: Sequence[Path] = (Path(),),
    fleets: Path = Path(),
) -> Suite:
    """A suite of the keys and values that a file has, whatever they come from. Raises `ConfigError`.

    Trace files are looked for in these folders, fleet files in the other one.
    """
    if not isinstance(content, dict):
        raise ConfigError(source, [Problem(ROOT, f"must be an object (got {shown(content)})")])
    try:
        suite = Suite.model_validate(content)
    except ValidationError as error:
        found = [*problems(error, _KEYS), *contradictions(content.get("classes"))]
        raise ConfigError(source, found) from None
    folders = {"traces": traces, "fleets": [fleets]}
    places = {
        key: [_located(name, of) for name in getattr(suite, key)] for key, of in folders.items()
    }
    found = [
        Problem(
            json_path((key, at)),
            f"is no file in {' or '.join(map(str, folders[key]))} (got {shown(getattr(suite, key)[at])})",
        )
        for key, paths in places.items()
        for at, path in enumerate(paths)
        if path is None
    ]
    found += contradictions([each._asdict() for each in suite.classes])
    found += _repeated(suite)
    found += _unknown(suite, places["fleets"])
    found += _parameters(suite)
    if found:
        raise ConfigError(source, found)
    return suite.model_copy(update={key: tuple(map(str, paths)) for key, paths in places.items()})


def _packaged() -> Path:
    return Path(str(resources.files("slagate.configs"))) / "suites"


def _located(name: str, folders: Sequence[Path]) -> Path | None:
    """The file of this name in the first of the folders that has one."""
    return next((path for folder in folders if (path := folder / name).is_file()), None)


def _repeated(suite: Suite) -> Iterator[Problem]:
    """What is given more than once: runs are told apart by these, of files by what `Path.stem` says."""
    given: dict[str, Sequence[object]] = {
        "traces": [Path(name).stem for name in suite.traces],
        "fleets": [Path(name).stem for name in suite.fleets],
        "policies": suite.policies,
        "loads": suite.loads,
        "seeds": suite.seeds,
    }
    for key, values in given.items():
        for at, value in enumerate(values):
            if value in values[:at]:
                yield Problem(json_path((key, at)), f"is there already (got {shown(value)})")


def _unknown(suite: Suite, fleets: Sequence[Path | None]) -> Iterator[Problem]:
    """Names of nothing that there is, with what was probably meant."""
    pools: list[str] = []
    for fleet in fleets:
        if fleet is not None and (suite.ranks or suite.slow):
            grids = load_config(fleet).stages.values()
            pools += (name for grid in grids for name in grid.pool_names)
    for at, name in enumerate(suite.policies):
        yield from _unless_known(("policies", at), name, "policy", NAMES)
    for policy in suite.parameters:
        yield from _unless_known(("parameters", policy), policy, "policy", NAMES)
    for name in suite.tenants:
        classes = [each.name for each in suite.classes]
        yield from _unless_known(("tenants", name), name, "class", classes)
    for name in suite.ranks:
        yield from _unless_known(("ranks", name), name, "pool", pools)
    if suite.slow is not None:
        yield from _unless_known(("slow", "pool"), suite.slow.pool, "pool", pools)


def _parameters(suite: Suite) -> Iterator[Problem]:
    """Parameters that their policy does not take; each is tried by itself, to find all."""
    for policy, values in suite.parameters.items():
        for name, value in values.items() if policy in NAMES else ():
            try:
                make(policy, {name: value})
            except UsageError as error:
                yield Problem(*str(error).split(": ", 1))


def _unless_known(
    path: Sequence[str | int], name: str, what: str, known: Collection[str]
) -> Iterator[Problem]:
    if name not in known:
        near = nearest(name, known)
        meant = f"; there are {', '.join(dict.fromkeys(known))}"
        if near is not None:
            meant = f", did you mean {shown(near)}?"
        yield Problem(json_path(path), f"is no known {what}{meant} (got {shown(name)})")
