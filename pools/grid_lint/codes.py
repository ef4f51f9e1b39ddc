"""What the linter of fleet files looks for: a stable code and a title for each, in groups.

G1 shape of the mapping, G2 axes and default targets, G3 time and cost by profile, G4 traffic, G5 overrides
and retry, G6 profiles. docs/lint.md has a section for each.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple, ParamSpec

CODES = MappingProxyType(
    {
        "G101": "a tighter target maps to a slower pool",
        "G102": "a longer prompt maps to a slower pool",
        "G103": "a pool that no request reaches",
        "G104": "a pool that only retries reach",
        "G105": "a pool that is only used as spill",
        "G106": "an axis that does nothing",
        "G107": "bands that differ in nothing",
        "G108": "a whole grid of one pool",
        "G109": "spill goes to a slower pool first",
        "G201": "requests without a target land in the slowest pool",
        "G202": "the default of a class lies on the edge of a band",
        "G203": "the default of a class lies outside the axis",
        "G204": "a size axis that does not begin at 0",
        "G205": "size bands narrower than a token",
        "G206": "latency bands too narrow to tell apart",
        "G301": "targets that no pool can ever meet",
        "G302": "long prompts whose targets no pool meets",
        "G303": "a pool that misses where another one meets",
        "G304": "a more expensive pool than needed",
        "G401": "traffic beyond the last size band",
        "G402": "traffic below the first size band",
        "G403": "size bands without traffic",
        "G501": "an override that an earlier one hides",
        "G502": "an override for priorities that nobody can send",
        "G503": "a higher priority gets a slower pool",
        "G504": "pools of equal priority never try each other",
        "G505": "retry is on and changes nothing",
        "G506": "pool priorities that contradict the profiles",
        "G601": "sizes beyond what the profile measured",
        "G602": "sizes that the KV cache of a pool cannot hold",
        "G603": "profiles of different models in one stage",
        "G604": "prefill and decode profiles of different models",
        "G605": "a pool without a profile beside pools with one",
    }
)


_P = ParamSpec("_P")


class LintCode(NamedTuple):
    """One thing to look at in a fleet file that loads: where, what with its figures, and what to do."""

    code: str
    path: str
    message: str
    advice: str


class Hit(NamedTuple):
    """One of several places with the same finding; `short` names it in a list of them."""

    path: str
    short: str
    message: str


LISTED = 6
"""As many more places, or pools, are named where a finding is about several."""


class Hits:
    """The places with one finding, of which only as many are put in words as the finding names."""

    def __init__(self) -> None:
        self._told: list[Hit] = []
        self._n = 0

    def add(self, hit: Callable[_P, Hit], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """One more place; `hit` is called with the rest at once, or never."""
        self._n += 1
        if len(self._told) <= LISTED:
            self._told.append(hit(*args, **kwargs))

    def findings(self, code: str, advice: str) -> list[LintCode]:
        """One finding for all places, told at the first of them; none for none."""
        if not self._told:
            return []
        first, *others = self._told
        message = first.message
        if others:
            listed = ", ".join(hit.short for hit in others)
            more = ", ..." if self._n > len(self._told) else ""
            message += f"; the same at {self._n - 1:,} more: {listed}{more}"
        return [LintCode(code, first.path, message, advice)]
