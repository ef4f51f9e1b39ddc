"""`slagate bench`: what it asks, its figures on known records, its files, its way through the levels."""

import asyncio
import csv
import io
import random
import re
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Sink
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.router.bench import bench as bench_module
from slagate.router.bench.bench import (
    VOCAB_SIZE,
    BenchPlan,
    FixedPrompts,
    Measured,
    NotReadyError,
    Sweep,
    TracePrompts,
    load_requests,
    wait_healthy,
)
from slagate.router.bench.picture import Point, frontier, write_pareto
from slagate.router.bench.report import (
    BROKEN,
    LevelFigures,
    Targets,
    ThroughputUnit,
    csv_text,
    figures,
    met,
    table,
)
from slagate.router.commands import cli
from slagate.router.loadgen.loadgen import Progress, ServedRequest, run_callers
from slagate.router.loadgen.trace import TraceRequest
from slagate.workers.errors import WorkerError
from slagate.workers.runtime.usage import UsageError
from slagate.workers.runtime.virtual_loop import run

GPUS = ThroughputUnit("gpu", 4)


def served(
    *,
    ttft_s: float | None = 0.1,
    itl_s: float | None = 0.01,
    e2e_s: float = 1.0,
    n_tokens: int = 11,
    status: Status = OK,
    fault: str = "",
) -> ServedRequest:
    tokens = tuple(range(n_tokens))
    return ServedRequest("r", 0.0, ttft_s, itl_s, tokens, status, fault, None, e2e_s)


REFUSED = served(
    ttft_s=None, itl_s=None, n_tokens=0, status=Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
)
CUT = served(n_tokens=5, status=Status(grpc.StatusCode.UNAVAILABLE, "gone"))
BAD = served(fault="finished after finished")


def level(
    *of: ServedRequest, concurrency: int = 2, seconds: float = 2.0, interrupted: bool = False
) -> LevelFigures:
    return LevelFigures(concurrency, of, seconds, interrupted, 0.25)


# --- figures ---------------------------------------------------------------------------------------


def test_throughput_is_of_answered_requests_over_the_whole_time() -> None:
    row = figures(
        level(served(), served(n_tokens=9), CUT, BAD, REFUSED), targets=Targets(), share=GPUS
    )
    assert (row["requests"], row["answered"]) == (5, 2)
    assert (row["requests_per_s"], row["output_tokens"], row["output_tokens_per_s"]) == (
        1.0,
        20,
        10.0,
    )
    assert (row["tokens_per_s_per_share"], row["share"], row["shares"]) == (2.5, "gpu", 4)
    assert row["errors"] == f"{BROKEN}:1 RESOURCE_EXHAUSTED:1 UNAVAILABLE:1"
    assert (row["sla_met"], row["interrupted"], row["client_busy"]) == (None, 0, 0.25)


def test_percentiles_are_over_answered_requests_in_ms() -> None:
    of = [served(ttft_s=n / 1000, itl_s=n / 10_000, e2e_s=n / 100) for n in range(101)]
    row = figures(level(*of, CUT), targets=Targets(), share=GPUS)
    assert [row[f"ttft_p{q}_ms"] for q in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert [row[f"itl_p{q}_ms"] for q in (50, 90, 99)] == [5.0, 9.0, 9.9]
    assert [row[f"e2e_p{q}_ms"] for q in (50, 90, 99)] == [500.0, 900.0, 990.0]
    assert row["tokens_per_s_per_user"] == 200.0  # 1 / 5 ms


def test_a_level_without_answers_has_no_latencies() -> None:
    row = figures(level(REFUSED), targets=Targets(ttft_ms=100.0), share=GPUS)
    assert (row["requests_per_s"], row["sla_met"]) == (0.0, 0.0)
    assert row["ttft_p50_ms"] is row["itl_p99_ms"] is row["tokens_per_s_per_user"] is None


@pytest.mark.parametrize(
    ("one", "targets", "is_met"),
    [
        (served(), Targets(100.0, 10.0), True),
        (served(), Targets(99.9, None), False),
        (served(), Targets(None, 9.9), False),
        (served(), Targets(99.9, 10.0), False),
        (served(itl_s=None, n_tokens=1), Targets(100.0, 5.0), True),
        (served(), Targets(0.0, None), False),
        (REFUSED, Targets(100.0, 10.0), False),
        (CUT, Targets(100.0, 10.0), False),
        (BAD, Targets(100.0, 10.0), False),
    ],
)
def test_a_request_meets_its_targets_when_it_is_answered_within_all_of_them(
    one: ServedRequest, targets: Targets, *, is_met: bool
) -> None:
    assert met(one, targets) == is_met
    row = figures(level(one, served(ttft_s=0.0, itl_s=0.0)), targets=targets, share=GPUS)
    assert row["sla_met"] == (1.0 if is_met else 0.5)


def some_rows() -> list[dict[str, Any]]:
    levels = [
        level(served(), served(ttft_s=0.2), concurrency=1),
        level(served(itl_s=0.02), REFUSED, concurrency=2, seconds=0.5, interrupted=True),
    ]
    return [figures(one, targets=Targets(150.0, None), share=GPUS) for one in levels]


def test_csv(golden: Callable[[str, str], None]) -> None:
    text = csv_text(
        some_rows(), {"model": "m, of two words", "prompts": "ISL 5, OSL 11", "seed": 7}
    )
    golden("bench.csv", text)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["concurrency"] for row in rows] == ["1", "2"]
    assert rows[1]["model"] == "m, of two words"


def test_the_table_marks_what_was_interrupted() -> None:
    console = Console(width=170, file=io.StringIO())
    console.print(table(some_rows(), "title"))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert any("/GPU" in line and "TTFT p50 p90 p99" in line for line in lines)
    assert any(re.search(r" 2\* .*RESOURCE_EXHAUSTED:1", line) for line in lines)
    assert "* interrupted: what had ended by then" in lines[-1]


# --- the picture -----------------------------------------------------------------------------------


def test_the_frontier_is_what_no_level_beats() -> None:
    def point(n: int, user: float, share: float) -> Point:
        return Point(n, user, share, None)

    of = [point(1, 90, 5), point(2, 95, 9), point(4, 80, 20), point(8, 80, 19), point(16, 60, 20)]
    assert [one.concurrency for one in frontier(of)] == [4, 2]
    assert [one.concurrency for one in frontier([point(1, 5, 5), point(2, 5, 5)])] == [1, 2]
    assert frontier([]) == []


def test_the_picture_is_a_png_or_an_svg_with_its_words(tmp_path: Path) -> None:
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    for path in (png, svg):
        write_pareto(some_rows(), path, title="A title", subtitle="ISL 5")
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1725, 840)
    text = svg.read_text()
    for words in ("A title", "ISL 5", "Pareto frontier", "per GPU", "1  (50%)", "target 150 ms"):
        assert words in text
    again = tmp_path / "b.svg"
    write_pareto(some_rows(), again, title="A title", subtitle="ISL 5")
    assert again.read_bytes() == svg.read_bytes()


def test_no_picture_of_nothing(tmp_path: Path) -> None:
    rows = [figures(level(REFUSED), targets=Targets(), share=GPUS)]
    with pytest.raises(UsageError, match=r"^--plot .*no level was answered"):
        write_pareto(rows, tmp_path / "a.png", title="", subtitle="")


# --- what is asked ---------------------------------------------------------------------------------


def test_fixed_prompts_are_of_one_size_and_never_alike() -> None:
    asked = list(islice(FixedPrompts(40, 7).prompts(random.Random(1)), 50))
    assert {(len(prompt), osl) for prompt, osl in asked} == {(40, 7)}
    assert len({tuple(prompt) for prompt, _ in asked}) == 50
    assert all(0 <= token < VOCAB_SIZE for prompt, _ in asked for token in prompt)
    assert asked == list(islice(FixedPrompts(40, 7).prompts(random.Random(1)), 50))
    other = next(FixedPrompts(40, 7).prompts(random.Random(2)))
    assert other[0] != asked[0][0]


def test_a_trace_shares_within_a_pass_and_not_between_two() -> None:
    """Else the second level of a sweep would be answered from the caches that the first one filled."""
    trace = [TraceRequest(0, 600, 3, (7, 8)), TraceRequest(9, 700, 5, (7, 9))]
    first, second, again, _ = islice(TracePrompts("t", trace).prompts(random.Random(1)), 4)
    assert [len(prompt) for prompt, _ in (first, second, again)] == [600, 700, 600]
    assert [osl for _, osl in (first, second, again)] == [3, 5, 3]
    assert first[0][:512] == second[0][:512]
    assert first[0][512:] != second[0][512:600]
    assert first[0][:512] != again[0][:512]


def test_requests_say_their_targets_and_end_where_they_should() -> None:
    metadata = (("x-slo-ttft-ms", "150"),)
    requests = load_requests(FixedPrompts(5, 7), random.Random(1), model="m", metadata=metadata)
    first, second = islice(requests, 2)
    message = oe.GenerateRequest.FromString(first.data)
    assert (message.model, len(message.token_ids.ids)) == ("m", 5)
    assert (message.stopping.max_tokens, message.stopping.ignore_eos) == (7, True)
    assert message.request_id == first.request_id != second.request_id
    assert first.metadata == metadata


# --- levels ----------------------------------------------------------------------------------------


class Gateway:
    """Answers each request after a second, and counts how many it has at once."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.n_running = self.most = self.n_seen = 0
        self.metadata: set[Metadata] = set()
        self._status = Status(grpc.StatusCode.UNAVAILABLE, "nobody") if refuses else OK

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> "Call":
        self.n_seen += 1
        self.metadata.add(metadata)
        return Call(self, oe.GenerateRequest.FromString(request), sink, self._status)


class Call:
    """One request of `Gateway`."""

    def __init__(
        self, gateway: Gateway, request: oe.GenerateRequest, sink: Sink, status: Status
    ) -> None:
        self._gateway = gateway
        gateway.n_running += 1
        gateway.most = max(gateway.most, gateway.n_running)
        self._running = True
        asyncio.get_running_loop().call_later(1.0, self._end, request, sink, status)

    def _end(self, request: oe.GenerateRequest, sink: Sink, status: Status) -> None:
        if not self._running:
            return
        if status == OK:
            n_tokens = request.stopping.max_tokens
            tokens = [oe.TokenInfo(token_id=n) for n in range(n_tokens)]
            for answer in (
                oe.GenerateResponse(token=oe.TokenOutput(tokens=tokens)),
                oe.GenerateResponse(
                    finished=oe.GenerationFinished(), usage=oe.Usage(completion_tokens=n_tokens)
                ),
            ):
                answer.request_id = request.request_id
                sink.message(answer.SerializeToString())
        sink.finish(status)

    def cancel(self) -> None:
        self._gateway.n_running -= self._running
        self._running = False

    def pause(self) -> None:
        """Nothing to hold up."""

    resume = pause


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float | None]] = []
        self.notes: list[str] = []
        self.done: list[float] = []

    def start_phase(self, what: str, total: float | None) -> None:
        self.phases.append((what, total))

    def update(self, done: float, state: str) -> None:
        self.done.append(done)

    def note(self, text: str) -> None:
        self.notes.append(text)


def plan(**changes: Any) -> BenchPlan:
    settled: dict[str, Any] = {
        "levels": (1, 3),
        "prompts": FixedPrompts(4, 2),
        "targets": Targets(150.0, None),
        "n_requests": None,
        "seconds": None,
        "per_caller": 2,
        "n_warmup": 3,
        "wait_s": 5.0,
        "timeout_s": 9.0,
        "seed": 1,
        "model": "m",
    }
    return BenchPlan(**settled | changes)


def sweep(
    gateway: Gateway, of: BenchPlan, heard: Heard, measured: Measured, busy: float = 0.0
) -> Sweep:
    def cpu_s() -> float:
        return busy * anyio.current_time()

    gateways: Any = [gateway]
    return Sweep(gateways, of, measured, heard, now_s=anyio.current_time, cpu_s=cpu_s)


def swept(gateway: Gateway, of: BenchPlan, heard: Heard, *, busy: float = 0.0) -> Measured:
    measured = Measured(model="m")

    async def main() -> None:
        levels = sweep(gateway, of, heard, measured, busy)
        await levels.warm_up()
        for concurrency in of.levels:
            await levels.measure_level(concurrency)

    run(main)
    return measured


def test_each_level_keeps_its_callers_busy_until_its_requests_are_gone() -> None:
    gateway, heard = Gateway(), Heard()
    measured = swept(gateway, plan(n_requests=7), heard)
    assert [(one.concurrency, len(one.served)) for one in measured.levels] == [(1, 7), (3, 7)]
    assert [one.seconds for one in measured.levels] == pytest.approx([7.0, 3.0])
    assert not any(one.interrupted for one in measured.levels)
    assert (gateway.most, gateway.n_running, gateway.n_seen) == (3, 0, 17)
    assert heard.phases == [("Warming up", 3), ("1 at once", 7), ("3 at once", 7)]
    assert gateway.metadata == {(("x-slo-ttft-ms", "150"),)}
    assert measured.levels[0].served[0].e2e_s == pytest.approx(1.0)
    assert heard.notes == []


def test_without_a_number_each_caller_sends_as_many() -> None:
    measured = swept(Gateway(), plan(n_warmup=0), Heard())
    assert [len(one.served) for one in measured.levels] == [2, 6]


def test_with_seconds_none_is_begun_after_them_and_all_are_answered() -> None:
    measured = swept(Gateway(), plan(seconds=2.5, n_warmup=0), Heard())
    assert [len(one.served) for one in measured.levels] == [3, 9]
    assert [one.seconds for one in measured.levels] == pytest.approx([3.0, 3.0])


def test_an_interrupted_level_keeps_what_had_ended() -> None:
    gateway, measured = Gateway(), Measured(model="m")

    async def main() -> None:
        with anyio.move_on_after(2.5):
            await sweep(gateway, plan(n_requests=50), Heard(), measured).measure_level(3)

    run(main)
    (only,) = measured.levels
    assert (len(only.served), only.interrupted) == (6, True)
    assert only.seconds == pytest.approx(2.5)
    assert gateway.n_running == 0


def test_a_level_with_nothing_to_show_is_left_out() -> None:
    measured = Measured(model="m")

    async def main() -> None:
        with anyio.move_on_after(0.5):
            await sweep(Gateway(), plan(), Heard(), measured).measure_level(1)

    run(main)
    assert measured.levels == []


def test_nothing_is_measured_after_a_warm_up_without_an_answer() -> None:
    heard, gateway = Heard(), Gateway(refuses=True)
    with pytest.raises(NotReadyError, match="no request of the warm-up was answered"):
        swept(gateway, plan(), heard)
    assert heard.notes == ["warm-up: 3 of 3 failed, the first with UNAVAILABLE: nobody"]
    assert gateway.n_seen == 3


def test_a_client_that_is_the_bottleneck_says_so() -> None:
    heard = Heard()
    measured = swept(Gateway(), plan(levels=(1,), n_warmup=0), heard, busy=0.95)
    assert measured.levels[0].client_busy_ratio == pytest.approx(0.95)
    assert heard.notes == [
        "1 at once: this process was busy 95% of the time, so latencies are partly its own"
    ]


def test_callers_take_turns_over_the_connections() -> None:
    gateways = [Gateway(), Gateway()]

    async def main() -> None:
        requests: Iterator[Any] = load_requests(
            FixedPrompts(1, 1), random.Random(1), model="m", metadata=()
        )
        results: list[ServedRequest] = []
        changes: list[int] = []

        def note(progress: Progress) -> None:
            changes.append(progress.n_done)

        await run_callers(
            gateways, islice(requests, 8), concurrency=4, seconds=None, timeout_s=1.0,
            on_change=note, results=results,
        )  # fmt: skip
        assert changes[-1] == len(results) == 8

    run(main)
    assert [(one.n_seen, one.most) for one in gateways] == [(4, 2), (4, 2)]


# --- health ----------------------------------------------------------------------------------------


class Unready:
    """Says each of these in turn, the last one for ever."""

    def __init__(self, *answers: oe.HealthResponse | Exception) -> None:
        self._answers = list(answers)

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


READY = oe.HealthResponse(state=oe.HEALTH_STATE_READY)
NOT_READY = oe.HealthResponse(
    state=oe.HEALTH_STATE_NOT_READY,
    checks=[oe.HealthCheck(name="grpc", message="decode: no ready worker")],
)
DOWN = WorkerError(Status(grpc.StatusCode.UNAVAILABLE, "refused"))


def test_health_is_waited_for() -> None:
    said: list[str] = []

    async def main() -> float:
        gateway: Any = Unready(DOWN, NOT_READY, READY)
        assert await wait_healthy(gateway, None, limit_s=9.0, on_state=said.append) is None
        return anyio.current_time()

    assert run(main) == pytest.approx(2 * bench_module.POLL_S)
    assert said == ["UNAVAILABLE: refused", "decode: no ready worker"]


def test_a_gateway_that_stays_down_is_given_up_with_its_reason() -> None:
    async def main() -> None:
        gateway: Any = Unready(NOT_READY)
        await wait_healthy(gateway, None, limit_s=9.0, on_state=lambda _: None)

    with pytest.raises(NotReadyError, match="not ready after 9 s: decode: no ready worker"):
        run(main)


# --- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--concurrency", "1,x"], "--concurrency must be whole numbers from 1 on"),
        (["--concurrency", "0"], "--concurrency must be whole numbers from 1 on"),
        (["--concurrency", "9999"], "--concurrency must be at most 4096"),
        (["--requests", "4"], "--requests 4: are too few for 32 at once (--concurrency)"),
        (["--requests", "99", "--seconds", "3"], "give either --requests or --seconds"),
        (["--trace", "sample", "--isl", "5"], "--trace has sizes of its own: give no --isl"),
        (["--trace", "nowhere"], "--trace nowhere: No such file"),
        (["--plot", "a.gif"], "--plot a.gif: must end in .png or .svg"),
        (["--csv", "nowhere/a.csv"], "--csv nowhere/a.csv: cannot be written: No such file"),
        (["--ttft-ms", "nan"], "--ttft-ms"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named(options: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "--insecure", "--target", "127.0.0.1:1", *options])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
