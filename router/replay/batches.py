"""Requests that decode together on one worker, looked ahead to their ends."""

import math
from typing import NamedTuple

import numpy as np

from slagate.router.replay.timelines import TINY_S, WorkerPace
from slagate.workers.profiles.profile import TpProfile
from slagate.workers.profiles.table import Floats


class BatchMember(NamedTuple):
    """One request that decodes, as it begins."""

    number: int
    n_steps: int  # tokens after the first one
    context_tokens: int
    reserved_tokens: int  # of KV cache, for all that it may become
    step_s: float  # that its steps may take in the mean


class Stall(NamedTuple):
    """A prompt that the worker computes in so many of its steps, which take longer by that work."""

    work_s: float  # of the profile
    n_steps: int


NO_STALL = Stall(0.0, 0)


class _Rows(NamedTuple):
    """Members in the order in which they leave, each array f64[n_members]."""

    members: list[BatchMember]
    leaves: Floats  # the step after which each leaves, counted from the first one of all
    offsets: Floats  # its tokens of context, less the steps that were made until then
    due_s: Floats

    def part(self, begin: int, end: int | None = None) -> "_Rows":
        """Those from `begin` on, and before `end`."""
        if not begin and end is None:
            return self
        which = slice(begin, end)
        return _Rows(
            self.members[which], self.leaves[which], self.offsets[which], self.due_s[which]
        )

    def joined(self, member: BatchMember, step: float, now_s: float) -> "_Rows":
        """These and one that begins now."""
        leaves = step + member.n_steps
        at = int(self.leaves.searchsorted(leaves, "right"))
        return _Rows(
            [*self.members[:at], member, *self.members[at:]],
            _inserted(self.leaves, at, leaves),
            _inserted(self.offsets, at, member.context_tokens - step),
            _inserted(self.due_s, at, now_s + member.step_s * member.n_steps),
        )


def _inserted(values: Floats, at: int, value: float) -> Floats:
    longer = np.empty(len(values) + 1)
    longer[:at], longer[at], longer[at + 1 :] = values[:at], value, values[at:]
    return longer


_NOBODY = _Rows([], np.zeros(0), np.zeros(0), np.zeros(0))


class DecodeBatch:
    """One worker's batch. It takes a request only if all then end in time, should no more come.

    All members get one token a step. One that joins does so at once, though a step has begun.
    """

    def __init__(self, profile: TpProfile, pace: WorkerPace, max_requests: int) -> None:
        self.now_s = 0.0
        self._profile, self._pace, self._max_requests = profile, pace, max_requests
        self._step = 0.0
        self._rows, self._ends_s = _NOBODY, np.zeros(0)
        self._slack_s = math.inf  # of the member that has the least

    def __len__(self) -> int:
        return len(self._rows.members)

    @property
    def first_end_s(self) -> float | None:
        """When the next member leaves; None if there is none."""
        return float(self._ends_s[0]) if self._rows.members else None

    def steps_left(self, index: int) -> float:
        """Steps that a member has to go."""
        return float(self._rows.leaves[index]) - self._step

    def stall_end_s(self, stall: Stall) -> float:
        """When a stall would end that begins now."""
        work_s, n = stall.work_s, len(self)
        if n and stall.n_steps:
            context = float(self._rows.offsets.sum()) / n + self._step
            work_s += stall.n_steps * self._profile.itl_s(n, context)
        return self._pace.end_s(self.now_s, work_s)

    def advance(self, now_s: float) -> None:
        """Go on to this time. No-op for one that is past."""
        if now_s <= self.now_s:
            return
        n_left = int(self._ends_s.searchsorted(now_s, "right"))
        if n_left:
            self._step = float(self._rows.leaves[n_left - 1])
            self.now_s = float(self._ends_s[n_left - 1])
            self._set(self._rows.part(n_left), self._ends_s[n_left:])
        if len(self):
            share = (now_s - self.now_s) / (float(self._ends_s[0]) - self.now_s)
            self._step += share * self.steps_left(0)
        self.now_s = now_s

    def join(
        self, member: BatchMember, stall: Stall = NO_STALL, *, first_by_s: float = math.inf
    ) -> bool:
        """Let it in when the stall ends, which is the time then, and at the latest at `first_by_s`.

        False, with nothing changed, if there is no room or if one of them would be late.
        """
        if self._pace.end_s(self.now_s, stall.work_s) > self.now_s + self._slack_s + TINY_S:
            return False  # of those that leave during the stall too
        end_s = self.stall_end_s(stall)
        return end_s <= first_by_s + TINY_S and self._take_in(
            self._rows, member, stall.n_steps, end_s
        )

    def replace_longest(self, member: BatchMember) -> BatchMember | None:
        """Let it in now instead of the member that leaves last, if that has more steps to go.

        The member that is out then; None, with nothing changed, if one would be late.
        """
        last = len(self) - 1
        if last < 0 or self.steps_left(last) <= member.n_steps:
            return None
        longest = self._rows.members[last]
        return longest if self._take_in(self._rows.part(0, last), member, 0, self.now_s) else None

    def _take_in(self, rows: _Rows, member: BatchMember, n_steps: int, now_s: float) -> bool:
        """Make these and the new one the batch after so many steps, unless one would be late."""
        if not self._has_room(rows, member):
            return False
        step = self._step + n_steps
        rows = rows.part(int(rows.leaves.searchsorted(step, "right")))
        if member.n_steps:
            rows = rows.joined(member, step, now_s)
        ends_s = self._ends(rows, step, now_s)
        if (ends_s > rows.due_s + TINY_S).any():
            return False
        self.now_s, self._step = now_s, step
        self._set(rows, ends_s)
        return True

    def _set(self, rows: _Rows, ends_s: Floats) -> None:
        self._rows, self._ends_s = rows, ends_s
        self._slack_s = float((rows.due_s - ends_s).min()) if rows.members else math.inf

    def _has_room(self, rows: _Rows, member: BatchMember) -> bool:
        reserved = member.reserved_tokens + sum([each.reserved_tokens for each in rows.members])
        is_free = len(rows.members) < self._max_requests
        return is_free and reserved <= self._profile.kv_capacity_tokens

    def _ends(self, rows: _Rows, step: float, now_s: float) -> Floats:
        """When each leaves. Between two that leave the batch is the same, and its contexts grow evenly."""
        n, leaves = len(rows.members), rows.leaves
        if not n:
            return leaves
        before = np.empty(n)
        before[0] = step
        before[1:] = leaves[:-1]
        sizes = np.arange(n, 0, -1)
        contexts = rows.offsets[::-1].cumsum()[::-1] / sizes + (before + leaves) / 2
        seconds = self._profile.itl_of_batches(sizes, contexts)
        seconds *= leaves - before
        return self._pace.ends_s(now_s, seconds.cumsum())
