"""Prefill and decode workers as pairs: which rows of a stage fit what the other stage has.

Workers are chosen one by one, and that is the end of it where the two chosen fit each other, as they do
in a fleet whose workers are all alike. Otherwise `policy.choose` chooses again: prefill among the rows
with a decode worker that can take over, then decode among those that can take over from the one chosen.
"""

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.pair_key import PairFit, PairKey, fit
from slagate.pools.inflight.rows import Flags, Rows

NOT_WHOLE = "does not say that it takes requests without a handoff"
NO_TAKER = "has no decode worker that it can hand over to"
TAKERS_AT_LIMIT = "waiting for a decode worker that it can hand over to"
CANNOT_TAKE_OVER = "cannot take over from the prefill worker"


class Partner(msgspec.Struct, frozen=True, gc=False):
    """A kind of workers of the other stage."""

    pair: PairKey
    is_open: bool  # one of them may be chosen now; else it is worth waiting for


class Pairing(msgspec.Struct, frozen=True, gc=False):
    """What the other stage of a request has: rows that fit none of it may not be chosen."""

    partners: tuple[Partner, ...]
    strict: bool  # only those that are known to fit, not those that may

    def excluded(self, stage: Stage, rows: Rows) -> Iterator[tuple[str, Flags]]:
        """Yield each reason why rows of `stage` may not be chosen, with those rows, bool[n_rows]."""
        reasons = [self._reason(stage, key) for key in rows.pairs.keys]
        for reason in sorted(set(reasons) - {""}):
            yield reason, np.array([each == reason for each in reasons])[rows.pairs.ids]

    def fits(self, stage: Stage, rows: Rows) -> Flags:
        """Which rows of `stage` may be chosen as far as this goes, bool[n_rows]."""
        fits = [not self._reason(stage, key) for key in rows.pairs.keys]
        flags: Flags = np.array(fits, dtype=np.bool_)[rows.pairs.ids]
        return flags

    def _reason(self, stage: Stage, own: PairKey) -> str:
        enough = PairFit.YES if self.strict else PairFit.MAYBE
        decodes = stage is Stage.DECODE
        fitting = [
            partner
            for partner in self.partners
            if (fit(partner.pair, own) if decodes else fit(own, partner.pair)) >= enough
        ]
        if any(partner.is_open for partner in fitting):
            return ""
        if decodes:
            return CANNOT_TAKE_OVER
        return TAKERS_AT_LIMIT if fitting else NO_TAKER


class Alone(msgspec.Struct, frozen=True, gc=False):
    """A bypass: a decode worker computes the prompt too, and there is no other stage."""

    def excluded(self, stage: Stage, rows: Rows) -> Iterator[tuple[str, Flags]]:
        """Yield why rows may not be chosen, as `Pairing.excluded` does."""
        yield NOT_WHOLE, rows.ints("takes_whole") == 0

    def fits(self, stage: Stage, rows: Rows) -> Flags:
        """Which rows may be chosen as far as this goes, as `Pairing.fits` does."""
        flags: Flags = rows.ints("takes_whole") != 0
        return flags


ALONE = Alone()


def with_worker(pair: PairKey, *, strict: bool) -> Pairing:
    """The pairing with one worker that is chosen already."""
    return Pairing((Partner(pair, is_open=True),), strict)


def partners(pools: Iterable[tuple[Rows, Flags, Flags]]) -> tuple[Partner, ...]:
    """The kinds of workers that a stage has.

    `pools` are the rows of each of its pools, those that may be chosen, and those worth waiting for.
    """
    found: dict[PairKey, bool] = {}
    for rows, is_open, is_awaited in pools:
        keys, ids = rows.pairs
        for at, key in enumerate(keys):
            mine = ids == at
            if (is_open & mine).any():
                found[key] = True
            elif (is_awaited & mine).any():
                found.setdefault(key, False)
    return tuple(Partner(key, is_open) for key, is_open in found.items())
