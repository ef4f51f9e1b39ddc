"""Decisions in English, for people: where a request goes and why, and where it would meet its targets."""

from collections.abc import Iterator, Sequence

from slagate.pools.fleet_file.models import ANY_CLASS
from slagate.pools.grid.grid import Stage
from slagate.pools.grid.json_text import shown
from slagate.router.request.sla import Sla
from slagate.router.scheduling.policy import Decision, LatencyTarget, StageChoice
from slagate.router.scheduling.score import RoutingRequest, ScoredRow
from slagate.router.scheduling.targets import fits_alone, is_unsure

POOLS_TOLD = 8
"""Pools that a sentence names."""


_ADMISSION = {
    "refused": "Admission is on, so it is refused.",
    "shadow": "Admission would refuse it if it were on.",
    "waits": "It waits while it would make others late and can still meet its targets.",
    "relegated": "As its class is relegated it waits until a worker has nothing else to do.",
}


def explained(decision: Decision) -> str:
    """The decision, a line for each stage, then what becomes of it."""
    lines = [_explain(decision.ask, choice) for choice in decision.stages]
    if decision.is_bypass:
        lines.append(_explain_bypass(decision))
    if decision.ask.admission_mode == "learn":
        lines.append(
            "Admission is on, but it is served: the idle workers have too few requests to learn from."
        )
    elif (words := _ADMISSION.get(decision.admission)) is not None:
        lines.append(words)
    if decision.ask.sla.is_unlisted:
        name = shown(decision.ask.sla.objective)
        lines.append(f'Class {name} is not in objectives, it counts as "{ANY_CLASS}".')
    return "\n".join(lines)


def _explain_bypass(decision: Decision) -> str:
    """Why a decode worker serves a request alone."""
    prefill = decision.untaken[0]
    nobody = [choice.stage.value for choice in decision.untaken if choice.row is None]
    if nobody:
        why = f"no {nobody[0]} worker can take it"
    elif any(choice.is_met is False for choice in decision.untaken):
        why = "by prefill and decode it is predicted to miss its targets"
    else:
        why = f"by prefill and decode a TTFT of {prefill.first_token_s * 1000:.1f} ms is predicted"
    return f"It is a decode worker that computes the prompt too: {why}."


def misses(decision: Decision) -> str:
    """In which stages and pools it is predicted to miss its targets, and which pools would meet them."""
    missed = (choice for choice in decision.stages if choice.is_met is False)
    return "; ".join(f"{choice.stage.value}: {_missed(choice)}" for choice in missed)


def _in_words(target: LatencyTarget, sla: Sla) -> str:
    name = _name(target)
    if target.source == "grid":
        return f"no {name} target (so the middle of the grid, {target.ms:g} ms)"
    of = " of its class" if target.source == "objective" else ""
    if target.field in sla.as_fast:
        return f"{name} target{of} 0 (judged as {target.ms:g} ms, the upper edge of its cell)"
    return f"{name} target{of} {target.ms:g} ms"


def _name(target: LatencyTarget) -> str:
    return target.field.removesuffix("_ms").upper()


def _own_targets(choice: StageChoice) -> str:
    """The targets that the request has in this stage, in words."""
    given = [target for target in choice.targets if target.source != "grid"]
    return " and ".join(f"{_name(target)} target of {target.ms:g} ms" for target in given)


def _missed(choice: StageChoice) -> str:
    looked_at = _listed([scored.pool.name for scored in choice.scored])
    if any(map(fits_alone, choice.scored)):
        missed = (
            f"in no pool that it may use ({looked_at}) it meets its {_own_targets(choice)} without making"
            " others late"
        )
    else:
        missed = (
            f"it is predicted to miss its {_own_targets(choice)}"
            f" in every pool that it may use ({looked_at})"
        )
    if len(choice.scored) == len(choice.grid.pool_names):
        return missed
    if not choice.would_meet:
        return f"{missed}, and no other pool of the stage is predicted to meet it"
    if choice.cell.by_rule:
        why = "a priority override has placed it"
    elif choice.grid.spill == "none":
        why = "scheduling.spill is none"
    else:
        why = "its cell does not list that one, and scheduling.spill is listed"
    return f"{missed}; pool {_listed(choice.would_meet)} would meet it, but {why}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:POOLS_TOLD], *(["..."] if len(names) > POOLS_TOLD else [])])


def _explain(ask: RoutingRequest, choice: StageChoice) -> str:
    inputs = [
        f"{ask.isl_tokens} prompt tokens",
        *(_in_words(target, ask.sla) for target in choice.targets),
    ]
    cell = "".join(f"[{index}]" for index in choice.cell.index)
    lines = [
        f"{choice.stage.value}: {' and '.join(inputs)} fall in cell {cell},"
        f" which is pool {choice.base_pool}."
    ]
    if choice.overridden:
        lines.append(
            f"Priority {ask.sla.priority} overrides that with pool {choice.pool_order[0]}."
        )
    winner = choice.winner
    if winner is None:
        reasons = ", ".join(sorted(choice.reasons)) or "the pool is empty"
        lines.append(f"No worker can take it: {reasons}.")
        return " ".join(lines)
    if choice.is_met is None and is_unsure(choice.won, winner.row):
        lines.append(f"Whether it meets its {_own_targets(choice)} there cannot be told.")
    elif choice.is_met is None:
        if choice.pool != choice.pool_order[0]:
            lines.append(f"No worker there can take it; pool {choice.pool} is next in the order.")
    elif not choice.is_met:
        missed = _missed(choice)
        lines.append(f"{missed[0].upper()}{missed[1:]}.")
    elif choice.pool != choice.pool_order[0]:
        own = _own_targets(choice)
        lines.append(f"Pool {choice.pool} is the first where it is predicted to meet its {own}.")
    else:
        lines.append(f"It is predicted to meet its {_own_targets(choice)} there.")
    return " ".join([*lines, *_explain_winner(ask, choice, winner)])


def _explain_winner(ask: RoutingRequest, choice: StageChoice, best: ScoredRow) -> Iterator[str]:
    n_open = sum(scored.n_open for scored in choice.scored)
    view = best.view
    name = view.address if view.rank is None else f"{view.address} rank {view.rank}"
    if n_open == 1:
        who = f"{name} is the only one that can take it"
    elif choice.is_met is not None:
        what = "is the fullest where it fits" if choice.is_met else "is the least late"
        who = f"Of {n_open} that can take it {name} {what}"
    elif is_unsure(choice.won, best.row):
        who = f"Of {n_open} that can take it {name} is the least late"
    elif choice.starved:
        who = f"Of {n_open} that can take it {name} had no request for longest, and is idle"
    else:
        who = f"Of {n_open} that can take it {name} has the least to do"
    yield (
        f"{who}: predicted load {best.score_s:.4f} s, with {view.inflight} in flight and"
        f" {view.queued_tokens} prompt tokens queued."
    )
    if choice.stage is not Stage.DECODE and view.cached_tokens:
        where = f", {view.host_tokens} of them on the host" if view.host_tokens else ""
        yield f"It has {view.cached_tokens} of the {ask.isl_tokens} prompt tokens cached{where}."
    for label, seconds in (("TTFT", best.predicted_ttft_s), ("ITL", best.predicted_itl_s)):
        if seconds is not None:
            yield f"Predicted {label} {seconds * 1000:.1f} ms."
    for scored in choice.scored:
        pool, bases = scored.pool.name, scored.pool.estimator
        for label, basis, calibration in (
            ("TTFT", bases.ttft_basis, bases.ttft_calibration),
            ("ITL", bases.itl_basis, bases.itl_calibration),
        ):
            if basis == "profile":
                yield f"What was learnt of {label} in pool {pool} is off: the profile alone predicts it."
            elif basis == "grid":
                yield f"Predictions of {label} in pool {pool} are off: no target decides there by them."
            if basis != "grid" and calibration is not None:
                yield (
                    f"Predictions of {label} in pool {pool} are off: they are corrected by how long"
                    " requests with such predictions took."
                )
