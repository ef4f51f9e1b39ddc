"""Lint, G6: whether the profiles fit the grids, and each other."""

from collections.abc import Iterator, Sequence

from slagate.pools.grid.grid import number_text
from slagate.pools.grid.json_text import json_path
from slagate.pools.grid_lint.times import measured_tokens
from slagate.pools.grid_lint.view import LintedStage
from slagate.workers.findings import Finding, warning


def profile_findings(views: Sequence[LintedStage]) -> Iterator[Finding]:
    """Yield G601 to G605: profiles that are missing, or do not fit the grids or each other."""
    for view in views:
        yield from _sizes(view)
        yield from _missing(view)
    yield from _models(views)


def _sizes(view: LintedStage) -> Iterator[Finding]:
    if view.size_axis is None:
        return
    served: dict[int, float] = {}
    for index, pools in view.cells.items():
        size = view.sizes(index).high
        for pool in pools:
            if size > served.get(pool, 0):
                served[pool] = size
    for pool, (name, profile) in enumerate(zip(view.names, view.profiles, strict=True)):
        if profile is None or pool not in served:
            continue
        longest = served[pool]
        measured = measured_tokens(profile, view.stage)
        if longest > measured:
            yield warning(
                "G601",
                json_path(("pools", name, "profile")),
                f"pool {name} serves prompts of up to {number_text(longest)} tokens; its profile measured"
                f" up to {number_text(measured)}, beyond that it is a guess",
                "End the axis where the profile ends, or measure longer prompts.",
            )
        if longest > profile.kv_capacity_tokens:
            yield warning(
                "G602",
                json_path(("pools", name, "tp")),
                f"pool {name} serves prompts of up to {number_text(longest)} tokens; the KV cache of one of"
                f" its workers holds {number_text(profile.kv_capacity_tokens)}",
                "Send such prompts to a pool with more memory, or end the axis earlier.",
            )


def _missing(view: LintedStage) -> Iterator[Finding]:
    if not any(view.profiles):
        return
    for name, profile in zip(view.names, view.profiles, strict=True):
        if profile is None:
            yield warning(
                "G605",
                json_path(("pools", name)),
                f"pool {name} has no profile, other {view.stage} pools have: its cells were not checked"
                " against times, and its workers are predicted from nothing at first",
                "Name a profile and tp for it.",
            )


def _models(views: Sequence[LintedStage]) -> Iterator[Finding]:
    of_stage: dict[str, tuple[str, str]] = {}
    for view in views:
        for name, profile in zip(view.names, view.profiles, strict=True):
            if profile is None:
                continue
            first_name, model = of_stage.setdefault(view.stage, (name, profile.model))
            if profile.model != model:
                yield warning(
                    "G603",
                    json_path(("pools", name, "profile")),
                    f"pool {name} has a profile of {profile.model}, {first_name} one of {model}; any"
                    f" {view.stage} pool may get any request",
                    "Use one model in a fleet file; a second model is a second fleet.",
                )
    if len({model for _, model in of_stage.values()}) > 1:
        (a, a_model), (b, b_model) = list(of_stage.values())[:2]
        yield warning(
            "G604",
            json_path(("pools", b, "profile")),
            f"pool {b} has a profile of {b_model}, {a} one of {a_model}; what one prefills the other has"
            " to go on with",
            "Use profiles of the same model in both stages.",
        )
