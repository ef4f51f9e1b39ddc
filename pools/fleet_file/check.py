"""All checks of one fleet file, with the pools that another file and the command line lay over it."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from slagate.pools.fleet_file.draft import ABSENT, ConfigReport, Path
from slagate.pools.fleet_file.hints import hint, unknown_keys
from slagate.pools.fleet_file.keys import STAGES, Form, form_of
from slagate.pools.fleet_file.models import FILES, AggFile, PrefillFile
from slagate.pools.fleet_file.rules import HALF, check_rules, read_profiles, worker_faults
from slagate.pools.fleet_file.spelling import drop_second_spellings, respelled
from slagate.pools.grid.json_text import ReadJson
from slagate.workers.profiles.profile import TpProfile

# pydantic's kinds of error, in words for someone who edits a file. Our own kinds bring theirs.
_REASONS = {
    "missing": "is required",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must have keys of valid Unicode",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "invalid_key": "must have string keys",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


class Extras(NamedTuple):
    """What besides the content of a fleet file says how to take it."""

    lenient: bool = False
    serving: bool = False
    repeated: Sequence[Path] = ()
    pools_name: str | None = None  # of the file with further pools
    pools: ReadJson = ReadJson(None, None, ())
    workers: Mapping[str, Sequence[str]] = MappingProxyType({})


class CheckedFile(NamedTuple):
    """A fleet file: what was found in it, and what is in use of it, as it is written."""

    draft: ConfigReport
    form: Form
    file: PrefillFile | AggFile | None  # None: `draft` has problems
    kept: Mapping[str, Any]
    profiles: Mapping[str, TpProfile] | None  # by pool; None: not asked for


def checked(content: Mapping[str, Any], extras: Extras) -> CheckedFile:
    """Check everything; nothing is raised, `draft` has all that is wrong."""
    draft = ConfigReport()
    form = form_of(content)
    kept = _merged(content, form, draft, extras)
    mode = kept.get("mode", "disagg")
    if not isinstance(mode, str) or mode not in ("disagg", "agg"):
        draft.refuse(("mode",), 'must be "disagg" or "agg"', mode)
    draft.content = respelled(kept, form, draft)
    if form.mode != "prefill":
        # When it is not valid the rest is checked as what it looks like: one slip hides no other.
        draft.content["mode"] = form.mode
    file = None
    try:
        file = FILES[form.mode].model_validate(draft.content)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            known = _REASONS.get(item["type"])
            reason = known.format(**item.get("ctx", {})) if known else item["msg"]
            draft.refuse(
                item["loc"], reason, ABSENT if item["type"] == "missing" else item["input"]
            )
    check_rules(draft, form)
    profiles = _check_serving(draft, form) if extras.serving else None
    return CheckedFile(draft, form, file, kept, profiles)


def _merged(
    content: Mapping[str, Any], form: Form, draft: ConfigReport, extras: Extras
) -> dict[str, Any]:
    """The content as it is written, with other sources laid over it and without what does not count."""
    kept = deepcopy(dict(content))
    kept.pop("$schema", None)  # with it an editor finds the schema
    for path in extras.repeated:
        draft.warn(path, "is given more than once, the last one counts")
    if extras.pools_name is not None:
        _lay_pools(kept, extras.pools, extras.pools_name, draft, lenient=extras.lenient)
    _lay_over(kept, _from_options(extras.workers), draft)
    for path in unknown_keys(kept, form):
        at: Any = kept
        for part in path[:-1]:
            at = at[part]
        value = at.pop(path[-1])
        if extras.lenient:
            draft.ignore(path)
        else:
            draft.refuse(path, hint(path, form), value)
    drop_second_spellings(kept, form, draft)
    return kept


def _lay_pools(
    kept: dict[str, Any], pools: ReadJson, name: str, draft: ConfigReport, *, lenient: bool
) -> None:
    """Lay the pools of the file `name` over those of the fleet file."""
    draft.move((name,), (), prefix=f"{name}: ")
    for path in pools.repeated:
        draft.warn((name, *path), "is given more than once, the last one counts")
    if not isinstance(pools.value, dict):
        draft.refuse((name,), "must be an object", pools.value)
        return
    for key in pools.value:
        if key == "pools":
            continue
        if lenient:
            draft.ignore((name, key))
        else:
            reason = 'unknown key, a file of pools has the key "pools"'
            draft.refuse((name, key), reason, pools.value[key])
    if "pools" not in pools.value:
        draft.refuse((name, "pools"), "is required", ABSENT)
    else:
        _lay_over(kept, _from_file(deepcopy(pools.value), name), draft)


class _Overlay(NamedTuple):
    """A value to put over that of a fleet file at `path`."""

    path: Path
    value: object
    prefix: str  # the file or option that gives it
    there: Path  # its path in that file


def _from_file(content: Mapping[str, object], name: str) -> Iterable[_Overlay]:
    """The pools section of `content`, which the file `name` holds; what is in no section stays out."""
    prefix = f"{name}: "
    pools = content.get("pools")
    if not isinstance(pools, dict):
        yield _Overlay(("pools",), pools, prefix, ("pools",))
        return
    for pool, spec in pools.items():
        path: Path = ("pools", pool)
        if not isinstance(spec, dict):
            yield _Overlay(path, spec, prefix, path)
            continue
        yield _Overlay(path, {}, prefix, path)
        for key, value in spec.items():
            yield _Overlay((*path, key), value, prefix, (*path, key))


def _from_options(workers: Mapping[str, Sequence[str]]) -> Iterable[_Overlay]:
    """Addresses by pool, as `--pool` gives them."""
    for pool, addresses in workers.items():
        yield _Overlay(("pools", pool), {}, "--pool ", (pool,))
        yield _Overlay(("pools", pool, "workers"), list(addresses), "--pool ", (pool,))


def _lay_over(content: dict[str, Any], overlays: Iterable[_Overlay], draft: ConfigReport) -> None:
    """Put each of `overlays` into `content`, whose objects must be copies."""
    for overlay in overlays:
        *parents, key = overlay.path
        at: Any = content
        for parent in parents:
            at = at.setdefault(parent, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict):
            continue  # what is there is no object, and will be refused
        if overlay.value == {} and isinstance(at.get(key), dict):
            continue
        at[key] = overlay.value
        draft.move(overlay.path, overlay.there, prefix=overlay.prefix)


def _check_serving(draft: ConfigReport, form: Form) -> dict[str, TpProfile]:
    """Check what a gateway needs besides; the profiles of the pools that name one."""
    if form.mode == "prefill":
        draft.refuse((), HALF, ABSENT)
    roles = {
        name: stage
        for stage, keys in STAGES[form.mode].items()
        for name in draft.get(keys.names) or ()
        if isinstance(name, str) and name
    }
    specs = draft.get("pools") if "pools" in draft.content else {}
    if not isinstance(specs, dict):
        return {}
    addresses: dict[str, Any] = {}
    named: dict[str, tuple[str, int | None]] = {}
    for name, spec in specs.items():
        if not isinstance(spec, dict):
            continue
        addresses[name] = draft.get("pools", name, "workers") if "workers" in spec else ()
        profile = draft.get("pools", name, "profile")
        if profile is not None:
            named[name] = profile, draft.get("pools", name, "tp")
    profiles, faults = read_profiles(named)
    for fault in (*worker_faults(roles, addresses), *faults):
        draft.refuse(fault.path, fault.reason, fault.got)
    return profiles
