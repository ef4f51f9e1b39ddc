"""What one engine was given and has not done: its prompts in order, and what its running requests can bear.

An engine computes prompts in order of arrival, in steps of at most so many prompt tokens. What comes before
the last step of its queue begins joins that step while there is room in it, and so delays the prompts that
end there. A step that computes prompts keeps the answers of the same engine waiting.

Work is in seconds as a profile has them; `rate` is how many seconds of the clock one of them takes.
"""

import math
from bisect import insort
from collections import deque
from typing import NamedTuple

QUIET_SHARE = 0.2
"""By so much of its predicted TTFT a prompt may be delayed without much ado."""

JOIN_S = 0.002
"""An idle engine begins a step so long after it was given something: what comes together is one step."""


class Work(NamedTuple):
    """The load of one leg on a rank, which its lease adds to the row: prefill and decode."""

    prefill_tokens: int = 0  # prompt tokens to prefill, until `Lease.prefill_done`
    work_s: float = 0.0  # the same as seconds of work, see `FrozenEstimator.work_s`
    context_tokens: int = 0  # KV tokens that each decode step reads of the request, on average
    # What the request was promised; infinite where it has no target, or is predicted to miss it.
    due_s: float = math.inf  # when the prompt is to be computed, on the gateway's clock
    itl_limit_s: float = math.inf  # seconds that a decode step may take
    stall_s: float = math.inf  # seconds of other prompts that its whole answer may wait for


class Held:
    """The work of one lease while it is on a row, and what it met there."""

    __slots__ = ("_stalls_end_s", "began_s", "joined_s", "stalled_s", "teaches", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.joined_s = 0.0  # work of later prompts that was done before its own prompt was
        self.stalled_s = 0.0  # seconds that its answer waited for other prompts; once it has ended
        # Work that its engine had done when its prompt was computed, or when its answer began.
        self.began_s = math.inf
        self.teaches = True  # how fast its row is; not with work in seconds of an earlier profile
        self._stalls_end_s = math.inf  # work given to its engine that its answer can bear

    @property
    def is_computed(self) -> bool:
        """Whether its prompt was taken out of the queue."""
        return self.began_s < math.inf


class EngineQueue:
    """The queue of one row. Times are on the gateway's clock; `step_tokens` 0: steps are not known."""

    __slots__ = (
        "_computed_s",
        "_ends_in_tail",
        "_given_s",
        "_limits_s",
        "_prompts",
        "_stalls",
        "head_s",
        "itl_limit_s",
        "join_quiet_s",
        "join_slack_s",
        "join_tokens",
        "join_until_s",
        "last_end_s",
        "queued_s",
        "since_s",
        "stall_room_s",
        "step_tokens",
    )

    def __init__(self) -> None:
        self.step_tokens = 0
        self.queued_s = 0.0  # work of prompts not computed, those begun included
        self.head_s = 0.0  # as much of it may have been done since `since_s`
        self.since_s = 0.0
        self.last_end_s = 0.0  # when it began its first prompt, or ended the one before that
        self.join_until_s = 0.0  # from then on the last step of the queue takes nothing in
        self.join_tokens = 0  # that it still has room for
        self.join_slack_s = math.inf  # seconds that may be added to it before a prompt is late
        self.join_quiet_s = math.inf  # the same, before one is delayed much
        self.itl_limit_s = math.inf  # the most that a decode step may take, as was promised
        self.stall_room_s = math.inf  # work of prompts that the answers can bear, as was promised
        self._prompts: deque[Held] = deque()
        self._ends_in_tail: list[Held] = []
        self._limits_s: list[float] = []  # ascending
        self._stalls: list[float] = []  # `_given_s` that the running answers can bear, ascending
        self._given_s = 0.0  # work of all prompts that it ever got
        self._computed_s = 0.0  # of those that have ended

    def done_s(self, now_s: float, rate: float) -> float:
        """Work done of what is in `queued_s`, as far as can be known."""
        if not self._prompts or rate <= 0.0:
            return 0.0
        done_s = (now_s - self.since_s) / rate
        return 0.0 if done_s < 0.0 else self.head_s if done_s > self.head_s else done_s

    def promise(self, held: Held) -> None:
        """Keep what the request of a lease was promised; its prompt was added before."""
        work = held.work
        if work.itl_limit_s < math.inf:
            insort(self._limits_s, work.itl_limit_s)
            self.itl_limit_s = self._limits_s[0]
        if work.stall_s < math.inf:
            held._stalls_end_s = self._given_s + work.stall_s
            insort(self._stalls, held._stalls_end_s)
            self.stall_room_s = self._stalls[0] - self._given_s

    def add_prompt(self, held: Held, now_s: float, rate: float, offset_s: float = JOIN_S) -> None:
        """Add the prompt of a lease at the end; an idle engine begins it `offset_s` later."""
        work = held.work
        ahead_s, room = 0.0, 0
        if self._prompts:
            ahead_s = self.queued_s - self.done_s(now_s, rate)
            room = self.join_tokens if now_s <= self.join_until_s else 0
        else:
            self.since_s, self.head_s = now_s, work.work_s
            self.last_end_s = now_s + offset_s
        self._prompts.append(held)
        self.queued_s += work.work_s
        self._given_s += work.work_s
        if self._stalls:
            self.stall_room_s = self._stalls[0] - self._given_s
        if self.step_tokens:
            self._extend_steps(held, now_s, rate, ahead_s, room)

    def _extend_steps(
        self, held: Held, now_s: float, rate: float, ahead_s: float, room: int
    ) -> None:
        """Put a prompt into the last step, which has so much `room`, and into steps behind it."""
        work = held.work
        n_tokens, own_s, takes_s = work.prefill_tokens, rate * work.work_s, rate * ahead_s
        takes_s += own_s
        slack_s, quiet_s = work.due_s - now_s - takes_s, QUIET_SHARE * takes_s
        if slack_s < 0.0:
            slack_s = math.inf  # it is late anyway
        if room:
            joins_s = work.work_s * min(1.0, room / n_tokens)
            self._ends_in_tail = [each for each in self._ends_in_tail if not each.is_computed]
            for other in self._ends_in_tail:
                other.joined_s += joins_s
        if n_tokens <= room:
            self.join_tokens = room - n_tokens
            self.join_slack_s = min(slack_s, self.join_slack_s - own_s)
            self.join_quiet_s = min(quiet_s, self.join_quiet_s - own_s)
            self._ends_in_tail.append(held)
            return
        in_tail = (n_tokens - room - 1) % self.step_tokens + 1
        self.join_tokens = self.step_tokens - in_tail
        self.join_slack_s, self.join_quiet_s = slack_s, quiet_s
        self.join_until_s = now_s + takes_s - own_s * in_tail / n_tokens + JOIN_S
        self._ends_in_tail = [held]

    def end_prompt(self, held: Held, now_s: float, rate: float, queued_tokens: int) -> None:
        """Take a prompt out: it is computed, or never will be; `queued_tokens` are those left.

        What was computed of the next one in the same step is not forgotten.
        """
        prompts, work_s = self._prompts, held.work.work_s
        is_first = prompts[0] is held
        if is_first:
            self.last_end_s = now_s
        prompts.remove(held)
        self._computed_s += work_s
        # Floats do not add up to zero again by themselves.
        self.queued_s = max(0.0, self.queued_s - work_s) if queued_tokens else 0.0
        if not prompts:
            self.head_s, self.join_tokens = 0.0, 0
            self.join_slack_s = self.join_quiet_s = math.inf
            self._ends_in_tail = []
        elif is_first:
            more_s = (now_s - self.since_s) / rate - work_s if rate > 0.0 else 0.0
            most_s = self.queued_s * min(1.0, self.step_tokens / max(1, queued_tokens))
            more_s = max(0.0, min(more_s, most_s))
            self.since_s = now_s - more_s * rate
            self.head_s = max(more_s, prompts[0].work.work_s)
        elif self.head_s > self.queued_s:
            self.head_s = self.queued_s  # what was begun with the first prompt is gone
        held.began_s = self._computed_s + self.done_s(now_s, rate)

    def forget_times(self) -> None:
        """Let the prompts that are queued not teach how fast the engine is."""
        for held in self._prompts:
            held.teaches = False

    def begin_answer(self, held: Held, now_s: float, rate: float) -> None:
        """Note that the answer of a request whose prompt was computed elsewhere begins. Idempotent."""
        if held.began_s == math.inf:
            held.began_s = self._computed_s + self.done_s(now_s, rate)

    def forget(self, held: Held, now_s: float, rate: float) -> None:
        """Take off what a lease was promised, and find how long its answer was stalled."""
        if held.work.itl_limit_s < math.inf:
            self._limits_s.remove(held.work.itl_limit_s)
            self.itl_limit_s = self._limits_s[0] if self._limits_s else math.inf
        if held._stalls_end_s < math.inf:
            self._stalls.remove(held._stalls_end_s)
            room_s = self._stalls[0] - self._given_s if self._stalls else math.inf
            self.stall_room_s = room_s
        if held.began_s < math.inf:
            done_s = self._computed_s + self.done_s(now_s, rate)
            held.stalled_s = max(0.0, done_s - held.began_s) * rate
