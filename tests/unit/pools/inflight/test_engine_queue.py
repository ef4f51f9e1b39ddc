"""The queue of one engine, against a plain model of one and against sums that are found anew each time."""

import math
import random
import sys
from types import FrameType

import pytest

from slagate.pools.inflight.engine_queue import JOIN_S, EngineQueue, Held, Work
from support.seeds import each_seed
from support.step_engine import EPSILON_S, StepEngine

STEP_TOKENS = 100
TICK_S = 0.0025
"""Prompts come and steps end at multiples of it, which is more than `JOIN_S`."""

TOKEN_S = TICK_S / 10
STEP_S = STEP_TOKENS * TOKEN_S
RATE = 2.0  # seconds of the clock for one of work

FIGURES = (
    "head_s",
    "itl_limit_s",
    "join_quiet_s",
    "join_slack_s",
    "join_tokens",
    "queued_s",
    "stall_room_s",
)
"""What a decision can see of a queue on which nothing is."""


def prompt(n_tokens: int, **promises: float) -> Held:
    return Held(Work(n_tokens, n_tokens * TOKEN_S / RATE, **promises))


class Both:
    """A queue, and the engine that it is to predict, which is as fast as expected."""

    def __init__(self, step_tokens: int = STEP_TOKENS) -> None:
        self.queue = EngineQueue()
        self.queue.step_tokens = step_tokens
        self.engine = StepEngine(step_tokens, TOKEN_S)
        self.held: list[Held] = []  # by number
        self.queued: list[int] = []
        self.predicted_s: list[float] = []  # when each would end if nothing joined it

    def run_to(self, now_s: float) -> None:
        """End all steps that end by then, and begin those that begin before."""
        while (end_s := self.engine.step_end_s) is not None and end_s <= now_s + EPSILON_S:
            for number in self.engine.end_step():
                self.take_out(number, end_s)
            if end_s < now_s - EPSILON_S:
                self.engine.begin(end_s)

    def add(self, n_tokens: int, now_s: float) -> int:
        number, held = len(self.held), prompt(n_tokens)
        ahead_s = self.queue.queued_s - self.queue.done_s(now_s, RATE)
        self.predicted_s.append(now_s + RATE * (ahead_s + held.work.work_s))
        self.held.append(held)
        self.queued.append(number)
        self.queue.add_prompt(held, now_s, RATE)
        self.engine.add(number, n_tokens)
        return number

    def take_out(self, number: int, now_s: float) -> None:
        self.queued.remove(number)
        left = sum(self.held[each].work.prefill_tokens for each in self.queued)
        self.queue.end_prompt(self.held[number], now_s, RATE, left)

    def cancel(self, number: int, now_s: float) -> None:
        self.engine.cancel(number)
        self.take_out(number, now_s)

    def error_s(self, now_s: float) -> float:
        """Seconds of the clock by which too much of the queue is taken to be done."""
        truth_s = TOKEN_S * self.engine.computed_tokens(self.queued, now_s)
        return RATE * self.queue.done_s(now_s, RATE) - truth_s


def arrivals(rng: random.Random, n: int) -> dict[int, list[int]]:
    """Tokens of prompts by tick: some come together, in steps that run, and on an idle engine."""
    found: dict[int, list[int]] = {}
    tick = 0
    for _ in range(n):
        tick += rng.choice([0, 0, 1, 2, 3, 5, 8, 20])
        found.setdefault(tick, []).append(10 * rng.randint(1, rng.choice([3, 12, 40])))
    return found


def assert_empty(queue: EngineQueue) -> None:
    assert {name: getattr(queue, name) for name in FIGURES} == {
        name: getattr(EngineQueue(), name) for name in FIGURES
    }
    assert queue.done_s(1e9, RATE) == 0.0


def play(seed: int, *, waits: bool) -> Both:
    """A history of prompts; `waits`: they come while all that is done in the step that runs is known."""
    both, late = Both(), 0
    for tick, prompts in arrivals(random.Random(seed), 40).items():
        both.run_to((tick + late) * TICK_S)
        while waits and both.error_s((tick + late) * TICK_S) < -EPSILON_S:
            late += 1
            both.run_to((tick + late) * TICK_S)
        now_s = (tick + late) * TICK_S
        assert -STEP_S - EPSILON_S <= both.error_s(now_s) <= EPSILON_S
        for n_tokens in prompts:
            both.add(n_tokens, now_s)
        both.engine.begin(now_s)
    both.run_to(math.inf)
    assert_empty(both.queue)
    return both


def test_each_prompt_ends_when_predicted_and_what_joined_it_is_known() -> None:
    def history(seed: int) -> None:
        both = play(seed, waits=True)
        for number, held in enumerate(both.held):
            joined_s = TOKEN_S * both.engine.joined[number]
            assert held.joined_s * RATE == pytest.approx(joined_s, abs=EPSILON_S), number
            end_s = both.predicted_s[number] + joined_s
            assert both.engine.ended_s[number] == pytest.approx(end_s, abs=EPSILON_S), number

    each_seed(30, history)


def test_behind_a_prompt_whose_end_is_not_told_yet_one_is_expected_a_step_late_at_most() -> None:
    """The end of a prompt is told at the end of its step, and nothing behind it counts as done before."""

    def history(seed: int) -> None:
        both = play(seed, waits=False)
        for number in range(len(both.held)):
            alone_s = both.engine.ended_s[number] - TOKEN_S * both.engine.joined[number]
            error_s = both.predicted_s[number] - alone_s
            assert -EPSILON_S <= error_s <= STEP_S + EPSILON_S, number

    each_seed(30, history)


def test_what_is_left_is_never_less_than_nothing_whoever_goes() -> None:
    def history(seed: int) -> None:
        rng, queue, now_s = random.Random(seed), EngineQueue(), 0.0
        queue.step_tokens = STEP_TOKENS
        held: list[Held] = []
        for _ in range(200):
            now_s += rng.choice([0.0, TICK_S, STEP_S, 1.0])
            if rng.random() < 0.5:
                held.append(prompt(rng.choice([5, 20, 150])))
                queue.add_prompt(held[-1], now_s, RATE)
            elif held:
                one = held.pop(rng.choice([0, -1, rng.randrange(len(held))]))
                left = sum(each.work.prefill_tokens for each in held)
                queue.end_prompt(one, now_s, RATE, left)
            for later_s in (0.0, TICK_S, 9.0):
                done_s = queue.done_s(now_s + later_s, RATE)
                assert 0.0 <= done_s <= queue.queued_s + EPSILON_S

    each_seed(20, history)


def test_with_cancelled_prompts_no_more_is_done_than_a_step_above_the_truth() -> None:
    def history(seed: int) -> None:
        rng, both = random.Random(seed), Both()
        for tick, prompts in arrivals(rng, 60).items():
            now_s = tick * TICK_S
            both.run_to(now_s)
            while both.queued and rng.random() < 0.3:
                both.cancel(rng.choice(both.queued), now_s)
                assert both.error_s(now_s) <= STEP_S + EPSILON_S
            for n_tokens in prompts:
                both.add(n_tokens, now_s)
            both.engine.begin(now_s)
            assert both.error_s(now_s) <= STEP_S + EPSILON_S
            assert 0.0 <= both.queue.done_s(now_s, RATE) <= both.queue.queued_s + EPSILON_S
        both.run_to(math.inf)
        assert_empty(both.queue)

    each_seed(30, history)


@pytest.mark.parametrize("slower", [0.5, 0.9, 1.1, 2.0])
def test_an_engine_of_another_speed_is_taken_to_be_a_step_ahead_at_most(slower: float) -> None:
    """What is done is counted by ends, and between two of them for one step only."""

    def history(seed: int) -> None:
        both = Both()
        both.engine = StepEngine(STEP_TOKENS, TOKEN_S * slower)
        for tick, prompts in arrivals(random.Random(seed), 40).items():
            now_s = tick * TICK_S * slower
            both.run_to(now_s)
            for n_tokens in prompts:
                both.add(n_tokens, now_s)
            both.engine.begin(now_s)
            first = both.held[both.queued[0]].work.prefill_tokens * TOKEN_S
            assert both.error_s(now_s) <= STEP_S + first + EPSILON_S
        both.run_to(math.inf)
        assert_empty(both.queue)

    each_seed(10, history)


def test_a_prompt_joins_until_its_step_begins_and_not_behind_it() -> None:
    queue = EngineQueue()
    queue.step_tokens = STEP_TOKENS
    first, second = prompt(150), prompt(20)
    queue.add_prompt(first, 1.0, RATE)
    begins_s = 1.0 + 100 * TOKEN_S
    assert queue.join_tokens == 50
    assert queue.join_until_s == pytest.approx(begins_s + JOIN_S)
    queue.add_prompt(second, begins_s, RATE)
    assert queue.join_tokens == 30
    assert first.joined_s == second.work.work_s
    third = prompt(20)
    queue.add_prompt(third, begins_s + 2 * JOIN_S, RATE)
    assert queue.join_tokens == 80, "it is in the next step"
    assert (first.joined_s, second.joined_s) == (second.work.work_s, 0.0)


def test_a_prompt_that_is_computed_is_joined_by_nothing() -> None:
    queue = EngineQueue()
    queue.step_tokens = STEP_TOKENS
    held = [prompt(150), prompt(20), prompt(10)]
    for each in held[:2]:
        queue.add_prompt(each, 0.0, RATE)
    joined_s = held[0].joined_s
    queue.end_prompt(held[0], 0.001, RATE, 20)  # the engine is faster than predicted
    queue.add_prompt(held[2], 0.001, RATE)
    assert held[0].joined_s == joined_s
    assert held[1].joined_s == held[2].work.work_s


def test_prompts_that_are_computed_cost_later_ones_nothing() -> None:
    """Of a hundred short ones each is computed before the next one comes, behind one that is not."""
    queue = EngineQueue()
    queue.step_tokens = 1000
    queue.add_prompt(prompt(1), 0.0, RATE)
    n_calls = [0]

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        n_calls[0] += event == "call"

    sys.setprofile(count)
    for _ in range(100):
        queue.add_prompt(held := prompt(1), 0.0, RATE)
        queue.end_prompt(held, 0.0, RATE, 1)
    sys.setprofile(None)
    assert n_calls[0] < 100 * 20


def test_within_its_slack_a_step_gets_longer_and_nobody_is_late() -> None:
    def history(seed: int) -> None:
        rng = random.Random(seed)
        queue = EngineQueue()
        queue.step_tokens = STEP_TOKENS
        due: list[tuple[float, float]] = []  # due time, predicted end
        for _ in range(rng.randint(1, 5)):
            n_tokens = rng.randint(1, 19)
            end_s = TOKEN_S * (n_tokens + sum(each.work.prefill_tokens for each in queue._prompts))
            due_s = end_s + rng.choice([math.inf, rng.uniform(0.0, 0.03)])
            queue.add_prompt(prompt(n_tokens, due_s=due_s), 0.0, RATE)
            due.append((due_s, end_s))
        all_end_s = RATE * queue.queued_s
        first_late_s = min(due_s for due_s, _ in due) - all_end_s
        were_in_time = [due_s for due_s, end_s in due if due_s >= end_s]
        assert len(were_in_time) == len(due)
        assert queue.join_slack_s == pytest.approx(first_late_s, abs=EPSILON_S)
        assert queue.join_quiet_s <= 0.2 * all_end_s + EPSILON_S

    each_seed(50, history)


def test_a_prompt_that_is_late_anyway_asks_for_nothing() -> None:
    queue = EngineQueue()
    queue.step_tokens = STEP_TOKENS
    queue.add_prompt(prompt(50, due_s=0.001), 0.0, RATE)
    assert queue.join_slack_s == math.inf


def test_promises_are_the_least_of_those_that_are_open() -> None:
    def history(seed: int) -> None:
        rng = random.Random(seed)
        queue, open_, given_s, now_s = EngineQueue(), [], 0.0, 0.0
        queue.step_tokens = rng.choice([0, STEP_TOKENS])
        ends: dict[int, float] = {}
        for _ in range(200):
            now_s += rng.random() / 100
            if rng.random() < 0.55:
                limit_s = rng.choice([0.01, 0.02, rng.random(), math.inf])
                stall_s = rng.choice([0.1, rng.random(), math.inf])
                held = prompt(rng.randint(1, 300), itl_limit_s=limit_s, stall_s=stall_s)
                queue.add_prompt(held, now_s, RATE)
                queue.promise(held)
                given_s += held.work.work_s
                ends[id(held)] = given_s + stall_s
                open_.append(held)
            elif open_:
                held = open_.pop(rng.randrange(len(open_)))
                queued = [each for each in open_ if not each.is_computed]
                left = sum(each.work.prefill_tokens for each in queued)
                if not held.is_computed:
                    queue.end_prompt(held, now_s, RATE, left)
                queue.forget(held, now_s, RATE)
            if open_ and rng.random() < 0.4:
                queued = [each for each in open_ if not each.is_computed]
                if queued:
                    left = sum(each.work.prefill_tokens for each in queued[1:])
                    queue.end_prompt(queued[0], now_s, RATE, left)
            assert queue.itl_limit_s == min(
                (each.work.itl_limit_s for each in open_), default=math.inf
            )
            room_s = min((ends[id(each)] - given_s for each in open_), default=math.inf)
            assert queue.stall_room_s == pytest.approx(room_s, abs=EPSILON_S)
        for held in open_:
            if not held.is_computed:
                queued = [each for each in open_ if not each.is_computed and each is not held]
                left = sum(each.work.prefill_tokens for each in queued)
                queue.end_prompt(held, now_s, RATE, left)
        for held in open_:
            queue.forget(held, now_s, RATE)
        assert_empty(queue)

    each_seed(20, history)


def test_an_answer_is_stalled_by_prompts_that_were_computed_while_it_ran() -> None:
    queue = EngineQueue()
    queue.step_tokens = STEP_TOKENS
    answer, other, behind = prompt(50), prompt(80), prompt(60)
    queue.add_prompt(answer, 0.0, RATE)
    queue.end_prompt(answer, 50 * TOKEN_S, RATE, 0)
    queue.add_prompt(other, 1.0, RATE)
    queue.end_prompt(other, 1.0 + 80 * TOKEN_S, RATE, 0)
    queue.add_prompt(behind, 2.0, RATE)
    queue.forget(answer, 2.0 + 30 * TOKEN_S, RATE)
    assert answer.stalled_s == pytest.approx((80 + 30) * TOKEN_S)


@pytest.mark.parametrize("step_tokens", [0, STEP_TOKENS])
@pytest.mark.parametrize("rate", [0.0, RATE])
def test_without_steps_or_a_rate_prompts_are_counted_whole(step_tokens: int, rate: float) -> None:
    queue = EngineQueue()
    queue.step_tokens = step_tokens
    held = [prompt(70), prompt(40), prompt(10)]
    for each in held:
        queue.add_prompt(each, 1.0, rate)
    if not step_tokens:
        assert queue.join_tokens == 0
        assert [each.joined_s for each in held] == [0.0, 0.0, 0.0]
        assert queue.done_s(9.0, rate) == (held[0].work.work_s if rate else 0.0)
    if not rate:
        assert queue.done_s(9.0, rate) == 0.0
    left = 120
    for each in (held[1], held[0], held[2]):
        left -= each.work.prefill_tokens
        queue.end_prompt(each, 9.0, rate, left)
    assert_empty(queue)
