"""The timing profiles that a build spec names: read, with the place in the spec of what cannot be."""

from collections.abc import Mapping, Sequence
from typing import Any

from slagate.pools.fleet_file.profiles import read_profiles
from slagate.pools.grid.errors import Problem
from slagate.pools.grid.json_text import json_path, shown
from slagate.workers.profiles.profile import TpProfile


def stage_profiles(
    stage: str, named: Mapping[int, tuple[str, int | None]]
) -> tuple[dict[int, TpProfile], list[Problem]]:
    """The profiles that can be used, by the number of the pool in the spec, and what is wrong with others.

    `named` has the name or path of a profile and its tensor parallel size; None: that was refused already.
    """
    found, faults = read_profiles({str(at): value for at, value in named.items()})
    problems = [
        Problem(json_path((stage, "pools", int(at), key)), f"{reason} (got {shown(got)})")
        for (_, at, key), reason, got in faults
    ]
    return {int(at): profile for at, profile in found.items()}, problems


def profile_problems(content: Mapping[str, Any], stages: Sequence[str]) -> list[Problem]:
    """What is wrong with the profiles of a spec as it was read, whatever else is wrong with it."""
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
