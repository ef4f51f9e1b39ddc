"""Lint, G4: the size axis of a grid against the prompts of a trace. A trace says nothing of targets."""

from collections.abc import Iterator, Sequence

from slagate.pools.grid_lint_codes import Finding
from slagate.pools.grid_lint_view import StageView, band_words, share, word
from slagate.pools.grid_words import number_text

MISSED_SHARE = 0.01
"""Fewer requests than this outside of an axis are outliers."""

_LISTED = 6


def traffic_findings(view: StageView, traffic: Sequence[int]) -> Iterator[Finding]:
    """The findings of G4 for prompts of these lengths in tokens."""
    if view.size_axis is None or not traffic:
        return
    axis = view.grid.axes[view.size_axis]
    name, total = word(axis.field), len(traffic)
    above = sum(size > axis.high for size in traffic)
    if above >= MISSED_SHARE * total:
        yield Finding(
            "G401",
            view.places.end(axis.field, last=True),
            f"{share(above, total)} of the trace are longer than {number_text(axis.high)} tokens and count"
            f" to the last {name} band; the longest has {number_text(max(traffic))}",
            "Extend the axis to the longest prompts: the last band was planned for shorter ones.",
        )
    below = sum(size < axis.low for size in traffic)
    if below >= MISSED_SHARE * total:
        yield Finding(
            "G402",
            view.places.end(axis.field, last=False),
            f"{share(below, total)} of the trace are shorter than {number_text(axis.low)} tokens and"
            f" count to the first {name} band; the shortest has {number_text(min(traffic))}",
            "Begin the axis at 0, or cut a band for the short prompts.",
        )
    used = {axis.index(size) for size in traffic}
    empty = [at for at in range(axis.resolution) if at not in used]
    if empty:
        listed = ", ".join(band_words(axis, at) for at in empty[:_LISTED])
        more = ", ..." if len(empty) > _LISTED else ""
        yield Finding(
            "G403",
            view.places.bands(axis.field),
            f"{len(empty)} of {axis.resolution} {name} bands get none of the {total:,} requests of"
            f" the trace: {listed}{more}",
            "Place the bands where the prompts are, or check that the trace is of this fleet.",
        )
