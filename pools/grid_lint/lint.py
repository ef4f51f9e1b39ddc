"""The linter of fleet files: what loads, and is probably not what was meant."""

from collections.abc import Mapping, Sequence

from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.grid_lint.axes import axes, traffic_findings
from slagate.pools.grid_lint.codes import LintCode
from slagate.pools.grid_lint.cost import cost
from slagate.pools.grid_lint.overrides import overrides, retry_changes_nothing
from slagate.pools.grid_lint.profiles import profile_findings
from slagate.pools.grid_lint.shape import shape
from slagate.pools.grid_lint.view import LintedStage
from slagate.workers.profiles.profile import TpProfile


def lint(
    config: FleetConfig, *, profiles: Mapping[str, TpProfile], traffic: Sequence[int] = ()
) -> list[LintCode]:
    """All findings about a fleet file, by code, and in the order of the file where codes are equal.

    `profiles` are by pool name; pools without one are judged by their priority numbers. `traffic` has the
    prompt length in tokens of each request of a trace.
    """
    views = [
        LintedStage(config, stage, profiles=profiles, traffic=traffic) for stage in config.stages
    ]
    found: list[LintCode] = []
    for view in views:
        found += shape(view)
        found += axes(view, config.objectives, has_traffic=bool(traffic))
        found += cost(view)
        found += traffic_findings(view, traffic)
        found += overrides(view)
    found += retry_changes_nothing(views)
    found += profile_findings(views)
    return sorted(found, key=lambda finding: finding.code)
