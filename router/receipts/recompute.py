"""Decides again from receipts alone: the same policy on the same figures must name the same winner.

Pools are built of the candidates, in the order of their rows. The grid and the uncorrected predictions come
with the configuration, the corrections and the draw with the choice.

Compared with the record are: of a choice the winner with its rank and pool, `cell`, `base_pool`,
`pool_order`, `overridden`, `targets`, `starved`, `is_met` and the pools that were looked at; of each
candidate `excluded`, `score_s` and both predictions; of a bypass that was tried whether it was taken; of
the request as it came `admission`. A figure that went in (state, limits, queues, cached tokens, the
admission mode ...) is found changed if one of these then comes out otherwise. Nothing else is compared: not
the order of the candidates, nor `would_meet`, `text`, `attempts`, `actual`, the number of retries, ids,
times.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from google.protobuf.message import Message

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.fleet_file.models import ADMISSION_MODES, AdmissionMode
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.demand import KeptRoom
from slagate.pools.inflight.pair_key import ANY_PAIR, PairKey
from slagate.pools.inflight.row_view import RowView, State
from slagate.pools.inflight.table import UNLIMITED, rows_of
from slagate.pools.prefix.match import cached_of
from slagate.proto import gateway_pb2 as gw
from slagate.router.receipts.config import RecordedConfig, UnusableReceipt
from slagate.router.receipts.messages import (
    FIGURES,
    FIGURES_WITH_LIMIT,
    SECONDS_WITH_LIMIT,
    STAGE_OF_WIRE,
    choice_steps,
)
from slagate.router.request.sla import Sla
from slagate.router.scheduling.bypass import is_better
from slagate.router.scheduling.pairs import ALONE, Pairing, Partner
from slagate.router.scheduling.policy import Decision, StageChoice, choose_stage
from slagate.router.scheduling.score import RoutingRequest
from slagate.workers.runtime.cooperative import run_at_once

TOLERANCE = 1e-9
"""Relative, of seconds: other processors and libraries may round exponentials otherwise in the last bit."""

_SECONDS = ("score_s", "queued_s", "foreign_s", "pace", *SECONDS_WITH_LIMIT)
_COUNTS = [name for name in (*FIGURES, *FIGURES_WITH_LIMIT) if name not in _SECONDS]


class Mismatch(NamedTuple):
    """A choice that comes out otherwise than it was recorded, with its first difference as two texts."""

    request_id: str
    stage: str  # or "admission", of the request as it came
    recorded: str
    recomputed: str


def decide_again(
    receipt: gw.Receipt, configs: Mapping[str, RecordedConfig]
) -> Iterator[Mismatch | None]:
    """Decide a receipt's choices again; yields for each None if it comes out the same, else a `Mismatch`.

    Choices that retries replaced come first, then the last one of each stage. Where a bypass was tried
    those of the way that was not taken follow. The very last one has a `Mismatch` too where the other way
    comes out, or another `admission`. `configs` has, by version, the configurations that come before the
    receipt in its stream. Raises `UnusableReceipt` naming the field where a choice cannot be decided again,
    which may be after results of others.
    """
    _check_stages(receipt, configs)
    places = [(f"receipt.replaced[{at}]", each) for at, each in enumerate(receipt.replaced)]
    last = receipt.decision.stages
    places += [(f"receipt.decision.stages[{at}]", each) for at, each in enumerate(last)]
    untaken = receipt.decision.untaken
    places += [(f"receipt.decision.untaken[{at}]", each) for at, each in enumerate(untaken)]
    modes = (*ADMISSION_MODES, "learn")
    if places and (mode := receipt.decision.admission_mode) not in modes:
        of = f"{', '.join(modes)}; receipts of older versions have none"
        raise UnusableReceipt(f"receipt.decision.admission_mode: must be one of {of}, got {mode!r}")
    again: list[StageChoice] = []
    for number, (place, recorded) in enumerate(places, start=1):
        rules = _rules(place, recorded.config_version, configs)
        found, choice = _decide_again(place, recorded, receipt.decision, rules)
        if choice is not None:
            again.append(choice)
        if number == len(again) == len(places):  # else one of them differs, which was told
            if found is None and untaken:
                found = _other_way(receipt.decision, again[len(receipt.replaced) :])
            found = found or _other_admission(receipt, again[: len(again) - len(untaken)], configs)
        yield found


def _other_way(decision: gw.Decision, again: Sequence[StageChoice]) -> Mismatch | None:
    """The difference where a bypass is taken that was not, or the other way round.

    `again` has what came out of the choices of the way that was taken, then of the other one.
    """
    alone = [choice for choice in again if choice.is_bypass]
    pair = tuple(choice for choice in again if not choice.is_bypass)
    was_taken = decision.stages[0].stage == gw.STAGE_AGG
    if is_better(alone[0], pair) is was_taken:
        return None
    words = ["prefill and decode", "a bypass of prefill workers"]
    recorded, recomputed = words[was_taken], words[not was_taken]
    return Mismatch(decision.request_id, Stage.AGG.value, recorded=recorded, recomputed=recomputed)


def _other_admission(
    receipt: gw.Receipt, again: Sequence[StageChoice], configs: Mapping[str, RecordedConfig]
) -> Mismatch | None:
    """The difference where something else becomes of the request as it came.

    `again` has what came out of the choices, the oldest first: it was decided by the first of each stage.
    """
    oldest, told = (*receipt.replaced, *receipt.decision.stages)[0], receipt.decision.admission
    first = {choice.stage: choice for choice in reversed(again)}
    if Stage.AGG in first:
        first = {Stage.AGG: first[Stage.AGG]}  # those of prefill and decode took over from it
    decision = Decision(again[0].ask, tuple(first.values()))
    found = decision.with_admission(configs[oldest.config_version].config.objectives).admission
    differs = Mismatch(receipt.decision.request_id, "admission", told or "none", found or "none")
    # How many waited already is not known.
    return None if found == told or (found, told) == ("waits", "refused") else differs


def _rules(place: str, version: str, configs: Mapping[str, RecordedConfig]) -> RecordedConfig:
    try:
        return configs[version]
    except KeyError:
        known = ", ".join(map(repr, configs))
        raise UnusableReceipt(
            f"{place}.config_version: {version!r} is not the version of a configuration before it,"
            f" {known}"
        ) from None


def _check_stages(receipt: gw.Receipt, configs: Mapping[str, RecordedConfig]) -> None:
    """Check that there is one choice for each stage, in order, or none if none was ever made.

    Or that there is a bypass in their place, which then are those that were not taken.
    """
    found = [STAGE_OF_WIRE.get(choice.stage) for choice in receipt.decision.stages]
    if not found and not receipt.replaced and not receipt.attempts:
        return
    rules = _rules("receipt", receipt.config_version, configs)
    untaken = [STAGE_OF_WIRE.get(choice.stage) for choice in receipt.decision.untaken]
    both = [Stage.PREFILL, Stage.DECODE]
    if list(rules.grids) == both and [found, untaken] in ([both, [Stage.AGG]], [[Stage.AGG], both]):
        return
    if untaken:
        raise UnusableReceipt("receipt.decision.untaken: is not what a bypass may come with")
    if found != list(rules.grids):
        wanted = ", ".join(stage.value for stage in rules.grids)
        got = ", ".join("no stage" if stage is None else stage.value for stage in found[:9])
        raise UnusableReceipt(f"receipt.decision.stages: must be {wanted} (got {got or 'nothing'})")


def _check_finite(place: str, message: Message, *names: str) -> None:
    for name in names:
        if not math.isfinite(getattr(message, name)):
            raise UnusableReceipt(f"{place}.{name}: must be a finite number")


class _NotLookedAt(Exception):
    """The policy asks for a pool that is not in the receipt."""


class _Pools(dict[str, PoolSnapshot]):
    def __missing__(self, name: str) -> PoolSnapshot:
        raise _NotLookedAt(name)


def _decide_again(
    place: str, recorded: gw.StageChoice, decision: gw.Decision, rules: RecordedConfig
) -> tuple[Mismatch | None, StageChoice | None]:
    """A choice made again, and how it differs; None where it could not be made."""
    stage = STAGE_OF_WIRE.get(recorded.stage)
    is_bypass = (
        stage is Stage.AGG and stage not in rules.grids and rules.config.scheduling.bypass == "auto"
    )
    grid = None if stage is None else rules.grids.get(Stage.DECODE if is_bypass else stage)
    if stage is None or grid is None:
        raise UnusableReceipt(f"{place}.stage: the fleet file has no such stage")
    if not 0 <= recorded.draw < 1:
        raise UnusableReceipt(f"{place}.draw: must be in [0, 1), got {recorded.draw}")
    _check_finite(place, recorded, "elapsed_s", "later_s")
    if not 0 <= recorded.answer_tokens < 2**32:
        raise UnusableReceipt(f"{place}.answer_tokens: must be in [0, 2^32)")
    keys = [
        PairKey(*(getattr(key, name) for name in PairKey._fields)) for key in recorded.pairing.keys
    ]
    pairing = ALONE if is_bypass else _pairing(place, recorded, keys)
    pools = _pools(place, recorded, decision, rules, keys)
    found: tuple[str, str] | None
    choice = None
    try:
        ask = _ask(recorded, decision, by_targets=rules.policy != "least_loaded")
        choice = choose_stage(
            stage,
            ask,
            grid,
            pools,
            draw=recorded.draw,
            pairing=pairing,
            later_s=recorded.later_s,
            says_elsewhere=False,  # of pools that were not looked at a receipt has nothing
        )
    except _NotLookedAt as error:
        found = f"the choice goes on to pool {error}", "it was not looked at"
    else:
        found = _difference(recorded, run_at_once(choice_steps(choice)))
    if found is None:
        return None, choice
    told, again = found
    return Mismatch(decision.request_id, stage.value, recorded=told, recomputed=again), None


def _ask(recorded: gw.StageChoice, decision: gw.Decision, *, by_targets: bool) -> RoutingRequest:
    sla = decision.sla
    _check_finite("receipt.decision.sla", sla, "ttft_ms", "itl_ms")
    return RoutingRequest(
        model=decision.model,
        isl_tokens=decision.isl_tokens,
        sla=Sla(
            ttft_ms=sla.ttft_ms if sla.HasField("ttft_ms") else None,
            itl_ms=sla.itl_ms if sla.HasField("itl_ms") else None,
            priority=sla.priority if sla.HasField("priority") else None,
            objective=sla.objective,
            by_objective=tuple(sla.by_objective),
            as_fast=tuple(sla.as_fast),
        ),
        excluded=frozenset(recorded.excluded_workers),
        elapsed_s=recorded.elapsed_s,
        answer_tokens=recorded.answer_tokens,
        growth_tokens=int(recorded.answer_tokens),
        is_protected=recorded.protected,
        yields=recorded.yields,
        by_targets=by_targets,
        admission_mode=cast('AdmissionMode | Literal["learn"]', decision.admission_mode),
    )


def _pools(
    place: str,
    recorded: gw.StageChoice,
    decision: gw.Decision,
    rules: RecordedConfig,
    keys: Sequence[PairKey],
) -> dict[str, PoolSnapshot]:
    """The pools that were looked at, as they were then."""
    if len(recorded.candidates) != recorded.candidates_total:
        raise UnusableReceipt(
            f"{place}.candidates: {len(recorded.candidates)} of {recorded.candidates_total};"
            " a receipt from a trailer is not enough to decide again"
        )
    views: dict[str, dict[int, RowView]] = {look.name: {} for look in recorded.pools}
    for at, candidate in enumerate(recorded.candidates):
        where = f"{place}.candidates[{at}]"
        if candidate.pool not in views:
            raise UnusableReceipt(
                f"{where}.pool: {candidate.pool!r} is not among the pools looked at"
            )
        by_row = views[candidate.pool]
        if candidate.row in by_row or candidate.row >= recorded.candidates_total:
            raise UnusableReceipt(f"{where}.row: {candidate.row} is not its number in the pool")
        by_row[candidate.row] = _view(where, candidate, decision.model, keys)
    pools = _Pools()
    for at, look in enumerate(recorded.pools):
        where = f"{place}.pools[{at}]"
        if look.name not in rules.estimators:
            raise UnusableReceipt(f"{where}.name: the fleet file has no pool {look.name!r}")
        if look.leases > UNLIMITED:
            raise UnusableReceipt(f"{where}.leases: is too large")
        try:
            estimator = rules.estimator(look)
        except ValueError as error:
            raise UnusableReceipt(f"{where}.{error}") from error
        by_row = views[look.name]
        if sorted(by_row) != list(range(len(by_row))):
            raise UnusableReceipt(f"{where}: rows of pool {look.name!r} are missing")
        rows = [by_row[row] for row in range(len(by_row))]
        device_tokens = np.array([view.device_tokens for view in rows], dtype=np.int64)
        host_tokens = np.array([view.host_tokens for view in rows], dtype=np.int64)
        pools[look.name] = PoolSnapshot(
            look.name,
            estimator,
            rows_of(rows),
            cached_of(device_tokens, device_tokens + host_tokens),
            look.leases,
            _kept(where, look),
        )
    return pools


def _kept(where: str, look: gw.PoolLook) -> KeptRoom | None:
    """The room that the pool kept for protected classes."""
    if not look.HasField("kept"):
        return None
    kept = look.kept
    _check_finite(f"{where}.kept", kept, "ttft_s", "itl_s")
    return KeptRoom(
        kept.rows,
        kept.ttft_s if kept.HasField("ttft_s") else math.inf,
        kept.itl_s if kept.HasField("itl_s") else math.inf,
    )


def _pairing(place: str, recorded: gw.StageChoice, keys: Sequence[PairKey]) -> Pairing | None:
    if not recorded.HasField("pairing"):
        return None
    found = recorded.pairing
    for at, partner in enumerate(found.partners):
        if partner.key >= len(keys):
            raise UnusableReceipt(
                f"{place}.pairing.partners[{at}].key: there is no key {partner.key}"
            )
    partners = (Partner(keys[partner.key], partner.is_open) for partner in found.partners)
    return Pairing(tuple(partners), found.strict)


def _view(where: str, candidate: gw.Candidate, model: str, keys: Sequence[PairKey]) -> RowView:
    if candidate.pair >= max(1, len(keys)):
        raise UnusableReceipt(f"{where}.pair: there is no key {candidate.pair}")
    for name in _COUNTS:
        if getattr(candidate, name) > UNLIMITED:
            raise UnusableReceipt(f"{where}.{name}: is too large")
    _check_finite(where, candidate, *_SECONDS)
    try:
        state = State(candidate.state)
    except ValueError:
        raise UnusableReceipt(f"{where}.state: there is no state {candidate.state!r}") from None
    figures: dict[str, Any] = {name: getattr(candidate, name) for name in FIGURES}
    for name in (*FIGURES_WITH_LIMIT, *SECONDS_WITH_LIMIT):
        unlimited = UNLIMITED if name in FIGURES_WITH_LIMIT else math.inf
        figures[name] = unlimited if (found := _value(candidate, name)) is None else found
    if figures["pace"] <= 0.0:
        raise UnusableReceipt(f"{where}.pace: must be above 0")
    return RowView(
        address=candidate.worker,
        rank=candidate.rank if candidate.HasField("rank") else None,
        state=state,
        models=frozenset({model} if candidate.serves_model else ()),
        pair=keys[candidate.pair] if keys else ANY_PAIR,
        **figures,
    )


def _difference(recorded: gw.StageChoice, again: gw.StageChoice) -> tuple[str, str] | None:
    """The first difference, as recorded and as it comes out; what matters most is compared first."""
    if _winner(recorded) != _winner(again):
        return _winner(recorded), _winner(again)
    for name in ("cell", "base_pool", "pool_order", "pool", "overridden", "starved", "is_met"):
        told, found = _value(recorded, name), _value(again, name)
        if told != found:
            return f"{name} {told}", f"{name} {found}"
    if _targets(recorded) != _targets(again):
        return f"targets {_targets(recorded)}", f"targets {_targets(again)}"
    looks, looks_again = ([look.name for look in each.pools] for each in (recorded, again))
    if looks != looks_again:
        return f"looks at pools {looks}", f"looks at pools {looks_again}"
    rows = {(each.pool, each.row): each for each in again.candidates}
    for candidate in recorded.candidates:
        other = rows[candidate.pool, candidate.row]
        name = _row(candidate)
        if candidate.excluded != other.excluded:
            return tuple(f"{name} {each.excluded or 'open'}" for each in (candidate, other))  # type: ignore[return-value]
        if not _is_same(candidate.score_s, other.score_s):
            return f"{name} at {candidate.score_s!r} s", f"{name} at {other.score_s!r} s"
        for field in ("predicted_ttft_ms", "predicted_itl_ms"):
            ms, ms_again = _value(candidate, field), _value(other, field)
            if not _is_same(ms, ms_again):
                return f"{name} {field} {ms}", f"{name} {field} {ms_again}"
    return None


def _targets(choice: gw.StageChoice) -> list[tuple[str, float, str]]:
    return [(target.field, target.ms, target.source) for target in choice.targets]


def _is_same(told: float | None, found: float | None) -> bool:
    if told is None or found is None:
        return told is found
    return math.isclose(told, found, rel_tol=TOLERANCE)


def _value(of: Message, field: str) -> Any:
    """The value of a field; None: it is optional, and absent."""
    has_presence = of.DESCRIPTOR.fields_by_name[field].has_presence
    return getattr(of, field) if not has_presence or of.HasField(field) else None


def _winner(choice: gw.StageChoice) -> str:
    if not choice.worker:
        return "nobody"
    return f"{_row(choice)} of pool {choice.pool}"


def _row(of: gw.Candidate | gw.StageChoice) -> str:
    return f"{of.worker} rank {of.rank}" if of.HasField("rank") else of.worker
