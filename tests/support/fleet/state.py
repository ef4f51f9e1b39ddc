"""All of a fleet's state as values that can be compared: equal only where nothing has changed."""

from typing import Any

from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Pool


def state_of(fleet: Fleet) -> dict[str, Any]:
    """Which objects there are, and every figure in them."""
    return {
        "grids": dict(fleet.grids),
        "objectives": dict(fleet.objectives),
        "scheduling": fleet.scheduling,
        "warnings": fleet.warnings,
        "models": set(fleet.models()),
        "pools": {name: _pool(pool) for name, pool in fleet.pools.items()},
        "leaving": [_pool(pool) for pool in fleet._leaving],
    }


def _pool(pool: Pool) -> dict[str, Any]:
    table = pool.table
    return {
        "id": id(pool),
        "about": (pool.name, pool.stage, pool.index, pool.limits),
        "estimator": (id(pool.estimator), pool.estimator.frozen, pool.estimator.n_observed),
        "counts": dict(pool.table.totals),
        "members": {address: _member(member) for address, member in pool.members.items()},
        "leaving": {address: _member(member) for address, member in pool._leaving.items()},
        "rows": (
            list(table.names),
            list(table._row_models),
            list(table._row_pairs),
            list(table._free),
        ),
        "figures": (table._ints.tobytes(), table._floats.tobytes()),
    }


def _member(member: Member) -> dict[str, Any]:
    return {
        "id": id(member),
        "text": repr(member),
        "limits": member.limits,
        "rows": list(member.ranks.rows),
        "models": dict(member.models),
        "drains": (member.draining_since_s, member.has_left, member._is_cut, member._n_retained),
        "legs": set(member.legs),
    }
