"""What an operator probably meant by a key that a fleet file does not have at that place."""

import difflib

from slagate.pools.grid_file import FILES, STAGES, STRATEGIES, OverrideRule, PoolSpec


def unknown_key(path: tuple[str | int, ...], mode: str) -> str:
    """Why the key at the end of `path` is refused in a file of this mode, with the likely correction."""
    parents, key = path[:-1], str(path[-1])
    levels = _levels(mode)
    here = _level_of(parents)
    for level, keys in levels.items():
        if level != here and key in keys:
            return f"unknown key at this level, it belongs {level}"
    for other in FILES.keys() - {mode}:
        if key in _top_keys(other):
            return f'unknown key in mode "{mode}", it belongs to mode "{other}"'
    close = difflib.get_close_matches(key, levels.get(here, ()), n=1, cutoff=0.7)
    return f'unknown key, did you mean "{close[0]}"?' if close else "unknown key"


def _levels(mode: str) -> dict[str, list[str]]:
    strategies = {
        _level_of((keys.strategy,)): list(STRATEGIES[keys.strategy].model_fields)
        for keys in STAGES[mode].values()
    }
    return {
        _level_of(()): _top_keys(mode),
        **strategies,
        _level_of(("pools", "")): list(PoolSpec.model_fields),
        _level_of(("strategy", "priority_overrides", 0)): list(OverrideRule.model_fields),
    }


def _top_keys(mode: str) -> list[str]:
    short = [keys.short_names for keys in STAGES[mode].values()]
    return [*FILES[mode].model_fields, *short]


def _level_of(parents: tuple[str | int, ...]) -> str:
    if not parents:
        return "at the top level"
    if parents[0] == "pools":
        return "in an entry of pools"
    if len(parents) == 1:
        return f"in {parents[0]}"
    return "in an entry of priority_overrides"
