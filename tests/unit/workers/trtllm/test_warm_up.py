"""The requests of a worker's own before it is ready: what is asked of which rank, and what fails them."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from slagate.workers.runtime import virtual_loop
from slagate.workers.sim import request as sim_request
from slagate.workers.sim.request import EngineDeadError, RequestError
from slagate.workers.trtllm.engine import Engine
from slagate.workers.trtllm.poll import Activity
from slagate.workers.trtllm.probe import SALT, TIMEOUT_S, InferenceProbe


class Answer:
    """A result that is there after `after_s`, or raises."""

    def __init__(
        self,
        *,
        tokens: tuple[int, ...] = (5,),
        after_s: float = 0.0,
        error: Exception | None = None,
    ) -> None:
        self.outputs = [SimpleNamespace(token_ids=list(tokens))]
        self.is_aborted = False
        self._after_s = after_s
        self._error = error

    def abort(self) -> None:
        self.is_aborted = True

    async def aresult(self) -> "Answer":
        await anyio.sleep(self._after_s)
        if self._error is not None:
            raise self._error
        return self


class Llm:
    def __init__(self, *answers: Answer, ranks: int = 1, bos: int | None = None) -> None:
        cache = SimpleNamespace(tokens_per_block=32)
        self.args = SimpleNamespace(
            tensor_parallel_size=ranks, enable_attention_dp=ranks > 1, kv_cache_config=cache
        )
        self.tokenizer = SimpleNamespace(tokenizer=SimpleNamespace(bos_token_id=bos))
        self.asked: list[SimpleNamespace] = []
        self._answers = list(answers)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: Any = None,
        disaggregated_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> Answer:
        self.asked.append(
            SimpleNamespace(
                tokens=inputs,
                sampling=sampling_params,
                kind=disaggregated_params.request_type,
                rank=getattr(scheduling_params, "attention_dp_rank", None),
                salt=cache_salt,
                priority=priority,
            )
        )
        return self._answers.pop(0)


def on(
    llm: Any,
    do: Callable[[InferenceProbe], Awaitable[str]],
    on_fatal: Callable[[Exception], None] = lambda _: None,
) -> str:
    async def main() -> str:
        async with anyio.create_task_group() as tasks:
            engine = Engine(llm, sim_request)
            probe = InferenceProbe(engine, Activity(), 2, tasks=tasks, on_fatal=on_fatal)
            failure = await do(probe)
            tasks.cancel_scope.cancel()
        return failure

    return virtual_loop.run(main)


def canary(probe: InferenceProbe) -> Awaitable[str]:
    return probe()


def warm_up(probe: InferenceProbe) -> Awaitable[str]:
    return probe.warm_up(10.0)


@pytest.mark.parametrize(("bos", "token"), [(128_000, 128_000), (None, 1)])
def test_the_canary_is_one_salted_greedy_token_before_all_others(
    bos: int | None, token: int
) -> None:
    llm = Llm(Answer(), bos=bos)
    assert on(llm, canary) == ""
    (asked,) = llm.asked
    assert asked.tokens == [token]
    assert (asked.salt, asked.priority, asked.kind) == (SALT, 1.0, "context_and_generation")
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (1, 0, 0.0)
    assert (sampling.top_k, sampling.top_p, sampling.ignore_eos) == (1, 1.0, True)


def test_every_rank_is_warmed_up_with_less_than_a_block() -> None:
    llm = Llm(*(Answer() for _ in range(3)), ranks=3)
    assert on(llm, warm_up) == ""
    assert [asked.rank for asked in llm.asked] == [0, 1, 2]
    for asked in llm.asked:
        assert asked.salt == SALT
        assert 1 < len(asked.tokens) + asked.sampling.max_tokens < 32


def test_without_attention_dp_no_rank_is_named() -> None:
    llm = Llm(Answer())
    assert on(llm, warm_up) == ""
    assert [asked.rank for asked in llm.asked] == [None]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(tokens=()), "the engine answered without a token"),
        (Answer(error=RequestError("no room")), "no room"),
        (Answer(error=KeyError()), "KeyError"),
    ],
)
def test_an_answer_that_is_none_fails_both(answer: Answer, said: str) -> None:
    assert on(Llm(answer), canary) == said
    assert on(Llm(answer), warm_up) == said
    assert on(Llm(Answer(), answer, ranks=2), warm_up) == f"rank 1: {said}"


def test_an_engine_that_does_not_answer_in_time_is_not_left_with_the_request() -> None:
    slow = Answer(after_s=100.0)
    assert on(Llm(slow), warm_up) == "no answer in 10 s"
    assert slow.is_aborted
    assert on(Llm(Answer(after_s=100.0)), canary) == f"no answer in {TIMEOUT_S:g} s"


@pytest.mark.parametrize("do", [canary, warm_up])
@pytest.mark.parametrize(
    ("answer", "is_dead"),
    [
        (Answer(tokens=()), False),
        (Answer(error=RequestError("no room")), False),
        (Answer(error=EngineDeadError(OSError("rank 0 died"))), True),
        (Answer(error=OSError("rank 0 died")), True),
    ],
)
def test_t2_3_a_probe_tells_of_a_dead_engine(
    answer: Answer, do: Callable[[InferenceProbe], Awaitable[str]], *, is_dead: bool
) -> None:
    deaths: list[Exception] = []
    assert on(Llm(answer), do, deaths.append)
    assert len(deaths) == is_dead
