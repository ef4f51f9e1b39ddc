"""All checks of one fleet file, with the pools that another file and the command line lay over it."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from slagate.pools.fleet_file.hints import hint, unknown_keys
from slagate.pools.fleet_file.keys import STAGES, Form, form_of
from slagate.pools.fleet_file.models import FILES, AggFile, PrefillFile
from slagate.pools.fleet_file.report import ABSENT, ConfigReport, Path
from slagate.pools.fleet_file.rules import HALF, check_rules, read_profiles, worker_faults
from slagate.pools.fleet_file.spelling import drop_second_spellings, respelled
from slagate.pools.fleet_file.validation import MISSING, reason
from slagate.pools.grid.json_text import ReadJson
from slagate.workers.profiles.profile import TpProfile


class CheckOptions(NamedTuple):
    """How to check a fleet file, and the pools and workers to merge into it."""

    lenient: bool = False  # leave unknown keys out, with a warning
    serving: bool = False  # check workers too, and read profiles
    repeated: Sequence[Path] = ()  # keys that are given more than once
    pools_name: str | None = None  # of the file with further pools
    pools: ReadJson = ReadJson(None, None, ())
    workers: Mapping[str, Sequence[str]] = MappingProxyType({})  # addresses by pool


class CheckedFile(NamedTuple):
    """A fleet file after its checks; `kept` is its content as written, without what was ignored."""

    report: ConfigReport
    form: Form
    file: PrefillFile | AggFile | None  # None: `report` has problems
    kept: Mapping[str, Any]
    profiles: Mapping[str, TpProfile] | None  # by pool; None: not asked for


def checked(content: Mapping[str, Any], extras: CheckOptions) -> CheckedFile:
    """Check the content of a fleet file. Problems are not raised: `report` has all of them."""
    report = ConfigReport()
    form = form_of(content)
    kept = _merged(content, form, report, extras)
    mode = kept.get("mode", "disagg")
    if not isinstance(mode, str) or mode not in ("disagg", "agg"):
        report.refuse(("mode",), 'must be "disagg" or "agg"', mode)
    report.content = respelled(kept, form, report)
    if form.mode != "prefill":
        # With an invalid mode the rest is checked as what it looks like: one error hides no other.
        report.content["mode"] = form.mode
    file = None
    try:
        file = FILES[form.mode].model_validate(report.content)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            got = ABSENT if item["type"] in MISSING else item["input"]
            report.refuse(item["loc"], reason(item), got)
    check_rules(report, form)
    profiles = _check_serving(report, form) if extras.serving else None
    return CheckedFile(report, form, file, kept, profiles)


def _merged(
    content: Mapping[str, Any], form: Form, report: ConfigReport, extras: CheckOptions
) -> dict[str, Any]:
    """The content as it is written, with other sources laid over it, and without ignored keys."""
    kept = deepcopy(dict(content))
    kept.pop("$schema", None)  # with it an editor finds the schema
    for path in extras.repeated:
        report.warn(path, "is given more than once, the last one counts")
    if extras.pools_name is not None:
        _lay_pools(kept, extras.pools, extras.pools_name, report, lenient=extras.lenient)
    for pool, addresses in extras.workers.items():
        _put(kept, ("pools", pool), {}, report, (pool,), "--pool ")
        _put(kept, ("pools", pool, "workers"), list(addresses), report, (pool,), "--pool ")
    for path in unknown_keys(kept, form):
        at: Any = kept
        for part in path[:-1]:
            at = at[part]
        value = at.pop(path[-1])
        if extras.lenient:
            report.ignore(path)
        else:
            report.refuse(path, hint(path, form), value)
    drop_second_spellings(kept, form, report)
    return kept


def _lay_pools(
    kept: dict[str, Any], pools: ReadJson, name: str, report: ConfigReport, *, lenient: bool
) -> None:
    """Lay the pools of the file `name` over those of the fleet file."""
    report.move((name,), (), prefix=f"{name}: ")
    for path in pools.repeated:
        report.warn((name, *path), "is given more than once, the last one counts")
    if not isinstance(pools.value, dict):
        report.refuse((name,), "must be an object", pools.value)
        return
    for key in pools.value:
        if key == "pools":
            continue
        if lenient:
            report.ignore((name, key))
        else:
            reason = 'unknown key, a file of pools has the key "pools"'
            report.refuse((name, key), reason, pools.value[key])
    if "pools" not in pools.value:
        report.refuse((name, "pools"), "is required", ABSENT)
        return
    specs, prefix = deepcopy(pools.value["pools"]), f"{name}: "
    if not isinstance(specs, dict):
        _put(kept, ("pools",), specs, report, ("pools",), prefix)
        return
    for pool, spec in specs.items():
        path = ("pools", pool)
        keys = spec if isinstance(spec, dict) else {}
        _put(kept, path, {} if keys is spec else spec, report, path, prefix)
        for key, value in keys.items():
            _put(kept, (*path, key), value, report, (*path, key), prefix)


def _put(
    content: Any, path: Path, value: object, report: ConfigReport, there: Path, prefix: str
) -> None:
    """Put `value`, from `there` in the file or option `prefix`, into `content`, which is a copy."""
    *parents, key = path
    for parent in parents:
        content = content.setdefault(parent, {}) if isinstance(content, dict) else None
    # A parent that is no object will be refused, and an object without keys adds nothing to another.
    if isinstance(content, dict) and not (value == {} and isinstance(content.get(key), dict)):
        content[key] = value
        report.move(path, there, prefix=prefix)


def _check_serving(report: ConfigReport, form: Form) -> dict[str, TpProfile]:
    """Check what only a gateway needs; returns the profiles of the pools that name one."""
    if form.mode == "prefill":
        report.refuse((), HALF, ABSENT)
    roles = {
        name: stage
        for stage, keys in STAGES[form.mode].items()
        for name in report.get(keys.names) or ()
        if isinstance(name, str) and name
    }
    specs = report.get("pools") if "pools" in report.content else {}
    if not isinstance(specs, dict):
        return {}
    addresses: dict[str, Any] = {}
    named: dict[str, tuple[str, int | None]] = {}
    for name, spec in specs.items():
        if not isinstance(spec, dict):
            continue
        addresses[name] = report.get("pools", name, "workers") if "workers" in spec else ()
        profile = report.get("pools", name, "profile")
        if profile is not None:
            named[name] = profile, report.get("pools", name, "tp")
    profiles, faults = read_profiles(named)
    for fault in (*worker_faults(roles, addresses), *faults):
        report.refuse(fault.path, fault.reason, fault.got)
    return profiles
