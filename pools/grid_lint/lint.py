"""The linter of fleet files: it finds what loads, and is probably not what was meant.

G1 shape of the mapping, G2 axes and default targets, G3 time and cost by profile, G4 traffic, G5 overrides
and retry, G6 profiles. docs/lint.md has a section for each.
"""

from collections.abc import Mapping, Sequence

from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.grid_lint.axes import axis_findings, traffic_findings
from slagate.pools.grid_lint.cost import cost_findings
from slagate.pools.grid_lint.overrides import override_findings, retry_findings
from slagate.pools.grid_lint.profiles import profile_findings
from slagate.pools.grid_lint.shape import shape_findings
from slagate.pools.grid_lint.view import LintedStage
from slagate.workers.findings import Finding
from slagate.workers.profiles.profile import TpProfile

CODES: Mapping[str, str] = {
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


def lint(
    config: FleetConfig, *, profiles: Mapping[str, TpProfile], traffic: Sequence[int] = ()
) -> list[Finding]:
    """All findings about a fleet file, by code, and in the order of the file where codes are equal.

    `profiles` are by pool name; pools without one are judged by their priority numbers. `traffic` has the
    prompt length in tokens of each request of a trace.
    """
    views = [
        LintedStage(config, stage, profiles=profiles, traffic=traffic) for stage in config.stages
    ]
    found: list[Finding] = []
    for view in views:
        found += shape_findings(view)
        found += axis_findings(view, config.objectives, has_traffic=bool(traffic))
        found += cost_findings(view)
        found += traffic_findings(view, traffic)
        found += override_findings(view)
    found += retry_findings(views)
    found += profile_findings(views)
    return sorted(found, key=lambda finding: finding.code)
