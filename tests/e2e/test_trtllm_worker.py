"""`slagate worker trtllm` as a process, over a double of the package: start, faults, end."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.client.client import WorkerClient, connect_worker
from slagate.workers.errors import WorkerError
from slagate.workers.legs import prefill_leg
from slagate.workers.sim.api import NEWEST, VERSIONS
from support.engine.double import Fault
from support.engine.process import arguments, environment, trtllm_worker
from support.engine.workers import expected, request
from support.gateway.processes import LOOPBACK, Process, eventually, run_cli
from support.limits import HANG_S
from support.seeds import is_long_run
from support.worker.contract import ask, hand_off, resume, start
from support.worker.sinks import KeepingSink

Code = grpc.StatusCode
PROMPT = list(range(1, 101))
ANYWHERE = ("--metrics-listen", f"{LOOPBACK}:0")


def talk(address: str, conversation: Callable[[WorkerClient], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with connect_worker(address) as worker:
                await conversation(worker)

    anyio.run(main)


def faulty(fault: Fault, request_id: str = "faulty") -> oe.GenerateRequest:
    return request(request_id, [int(fault), *PROMPT], 4)


def events(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.stderr().splitlines()]


def logged(process: Process, event: str) -> list[dict[str, Any]]:
    return [line for line in events(process) if line["event"] == event]


def http(process: Process, path: str, address: str = "") -> tuple[int, str]:
    at = address or process.ready["metrics"]
    try:
        with urllib.request.urlopen(f"http://{at}{path}", timeout=HANG_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def sample(process: Process, name: str) -> float:
    """The sum of a name's samples."""
    text = http(process, "/metrics")[1]
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One that several tests ask, with room for four KV events only."""
    folder = tmp_path_factory.mktemp("agg")
    few = {"event_buffer_max_size": 4}
    with trtllm_worker(folder, "agg", *ANYWHERE, kv_cache_config=few) as worker:
        worker.wait_ready()
        yield worker


# --- the start -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        arguments("agg"),
        ["worker", "trtllm"],
        # With an argument that is wrong, and without certificates.
        [
            "worker",
            "trtllm",
            "--role",
            "prefill",
            "--model",
            "m",
            "--listen",
            f"{LOOPBACK}:0",
        ],
    ],
    ids=["ready-to-run", "nothing", "wrong"],
)
def test_without_the_package_it_is_said_what_to_install(given: list[str]) -> None:
    ended = run_cli(*given)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "pip install 'slagate[trtllm]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_while_the_engine_loads_the_worker_says_so_and_a_signal_ends_it(tmp_path: Path) -> None:
    options = (*ANYWHERE, "--start-progress", "0.1")
    with trtllm_worker(tmp_path, "agg", *options, settings={"init": "hang"}) as worker:
        eventually(lambda: len(logged(worker, "engine.starting")) >= 2, "progress is told")
        progress = logged(worker, "engine.starting")
        assert {line["phase"] for line in progress} <= {"import", "engine"}
        assert progress[-1]["total_seconds"] > progress[0]["total_seconds"]
        eventually(lambda: logged(worker, "engine.starting")[-1]["phase"] == "engine", "constructs")
        (listening,) = logged(worker, "worker.listening")
        assert http(worker, "/healthz", listening["metrics"])[0] == 200
        code, reason = http(worker, "/readyz", listening["metrics"])
        assert (code, reason) == (503, "the engine is starting: engine\n")

        async def conversation(client: WorkerClient) -> None:
            health = await client.health(oe.HealthRequest())
            assert health.state == oe.HEALTH_STATE_STARTING
            sink = await ask(client, request("r", PROMPT))
            assert (sink.code, sink.messages) == (Code.UNAVAILABLE, [])
            with pytest.raises(WorkerError) as raised:
                await client.server_info()
            assert raised.value.status.code is Code.UNAVAILABLE

        talk(listening["listen"], conversation)
        assert worker.terminate() == 0
        assert worker.rest_of_stdout() == b"", "it was never ready"
        assert logged(worker, "engine.start_given_up")


@pytest.mark.parametrize(
    ("options", "settings", "status", "said"),
    [
        ((), {"init": "fail"}, 1, "CUDA out of memory"),
        (("--warm-up-timeout", "0.1"), {"time_scale": 1e6}, 1, "no answer in 0.1 s"),
        (("--tp", "16"), {}, 1, "16 GPUs are needed"),
        (("--allow-unknown-engine-args",), {}, 2, "says: 1 validation error for TorchLlmArgs"),
        ((), {"init": "no file"}, 2, "No such file or directory: 'balancer.yaml'"),
        ((), {"init": "not implemented"}, 2, "KV Cache Connector is not supported with beams"),
    ],
)
def test_a_start_that_fails_says_why(
    tmp_path: Path, options: tuple[str, ...], settings: dict[str, Any], status: int, said: str
) -> None:
    engine = {"colour": "red"} if options == ("--allow-unknown-engine-args",) else {}
    with trtllm_worker(tmp_path, "agg", *options, settings=settings, **engine) as worker:
        assert worker.popen.wait(HANG_S) == status
        assert worker.rest_of_stdout() == b""
        assert said in worker.stderr()


def test_an_encoder_that_does_not_start_says_so(tmp_path: Path) -> None:
    with trtllm_worker(tmp_path, "encode", settings={"init": "fail"}) as worker:
        assert worker.popen.wait(HANG_S) == 1
        (line,) = logged(worker, "engine.start_failed")
        assert "CUDA out of memory" in line["traceback"]


def test_bindings_of_openengine_that_come_with_the_package_are_named(tmp_path: Path) -> None:
    """Protobuf's default pool takes each message once, and ours are there already."""
    with trtllm_worker(tmp_path, "agg", settings={"bindings": True}) as worker:
        assert worker.popen.wait(HANG_S) == 2
        (said,) = [line for line in worker.stderr().splitlines() if line.startswith("slagate: ")]
        assert "tensorrt_llm.grpc.openengine.error_pb2" in said
        assert "slagate.proto.openengine_pb2" in said
        assert "Traceback" not in worker.stderr()


@pytest.mark.parametrize("is_named", [True, False])
def test_bindings_of_openengine_that_were_there_before_ours_are_named(*, is_named: bool) -> None:
    """Today's protobuf raises a TypeError; whoever imports ours without the command gets that."""
    command = "from slagate.router.__main__ import main; main()"
    ours = command if is_named else "import slagate.proto.openengine_pb2"
    code = f"import tensorrt_llm.grpc.openengine; {ours}"
    environ = os.environ | environment(NEWEST) | {"TLLM_LOG_LEVEL": "INFO"}
    ended = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    if not is_named:
        assert ended.returncode == 1
        assert "TypeError: " in ended.stderr
        assert "duplicate symbol 'openengine.v1." in ended.stderr
        return
    assert (ended.returncode, ended.stdout) == (2, "")
    (said,) = ended.stderr.splitlines()
    assert "tensorrt_llm.grpc.openengine.error_pb2" in said
    assert "slagate.proto.openengine_pb2" in said


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("role", ["agg", "encode"])
def test_no_engine_reports_to_nvidia_unless_it_is_asked_to(
    tmp_path: Path, version: str, role: str
) -> None:
    """By the argument where there is one; a candidate of 1.3 had reports, and only variables."""
    is_between = version == "1.3rc" and role == "agg"
    settings = {"reports": True} if is_between else {}
    with trtllm_worker(tmp_path, role, version=version, settings=settings) as worker:
        worker.wait_ready()
        assert not logged(worker, "double.telemetry")
    if version == NEWEST and role == "agg":
        asked = {"telemetry_config": {"disabled": False}}
        with trtllm_worker(tmp_path, role, name="asked", **asked) as worker:
            worker.wait_ready()
            assert logged(worker, "double.telemetry")


@pytest.mark.parametrize("version", VERSIONS)
def test_what_an_engine_can_do_is_found_out_and_told_at_the_start(
    tmp_path: Path, version: str
) -> None:
    with trtllm_worker(tmp_path, "agg", version=version) as worker:
        worker.wait_ready()
        eventually(lambda: logged(worker, "engine.ready"), "the log is written")
        (told,) = logged(worker, "engine.abilities")
    is_old = version in ("1.1", "1.2")
    assert told["level"] == "INFO"
    assert told["statistics"] == told["kv_events"] == ("queue" if version == "1.1" else "call")
    for name in ("kv_capacity", "health_check", "fatal_flag", "handoff_ids"):
        assert told[name] is not is_old
        assert (name in told["off"]) is is_old
    assert told["process_futures"]
    assert told["dead_error"] is told["telemetry_argument"] is (version == NEWEST)
    assert ("priority" in told["generate_async"]) is not is_old
    assert ("conversation_params" in told["off"]) is (version != NEWEST)
    assert told["metrics_collector"] == (
        "log_metrics_dict" if is_old else "log_request_metrics_dict"
    )


def test_the_end_of_text_must_be_known(tmp_path: Path) -> None:
    with trtllm_worker(tmp_path, "agg", skip_tokenizer_init=True) as worker:
        assert worker.popen.wait(HANG_S) == 2
        assert "--end-id is needed" in worker.stderr()
    options = ("--end-id", "7")
    with trtllm_worker(tmp_path, "agg", *options, skip_tokenizer_init=True) as worker:
        worker.wait_ready()


def test_a_processor_for_every_request_must_fit_the_engines_vocabulary(tmp_path: Path) -> None:
    processor = 'forced_response={"token_ids": [999999999]}'
    with trtllm_worker(tmp_path, "agg", "--logits-processor", processor) as worker:
        assert worker.popen.wait(HANG_S) == 2
        assert worker.rest_of_stdout() == b""
        assert "999999999 is outside the vocabulary" in worker.stderr()


# --- what an engine does to its requests -----------------------------------------------------------


def test_errors_of_a_request_are_nobody_elses(agg: Process) -> None:
    """What the engine refuses, fails, or leaves without an end, while another request goes on."""

    async def conversation(worker: WorkerClient) -> None:
        other = KeepingSink()
        start(worker, request("other", PROMPT, 40).SerializeToString(), other)
        refused = await ask(worker, faulty(Fault.REFUSE))
        assert (refused.code, refused.messages) == (Code.INVALID_ARGUMENT, [])
        for fault, said in (
            (Fault.FAIL, "the request failed"),
            (Fault.EMPTY, "the engine's answer has no end"),
        ):
            sink = await ask(worker, faulty(fault))
            assert (sink.code, sink.events) == (Code.OK, ["error"])
            error = sink.messages[0].error
            assert (error.code, error.retryable) == (oe.ERROR_CODE_INTERNAL, False)
            assert error.message == said
        assert (await other.done()).tokens == expected(PROMPT, 40)
        assert (await worker.health(oe.HealthRequest())).state == oe.HEALTH_STATE_READY

    before = {
        outcome: sample(agg, f'slagate_worker_requests_total{{.*outcome="{outcome}"}}')
        for outcome in ("ok", "refused", "failed")
    }
    talk(agg.address, conversation)
    for outcome, n in (("ok", 1), ("refused", 1), ("failed", 2)):
        name = f'slagate_worker_requests_total{{.*outcome="{outcome}"}}'
        assert sample(agg, name) == before[outcome] + n


def test_a_request_that_hangs_ends_with_its_deadline(agg: Process) -> None:
    async def conversation(worker: WorkerClient) -> None:
        sink = KeepingSink()
        data = faulty(Fault.HANG, "hangs").SerializeToString()
        start(worker, data, sink, timeout_s=0.2)
        assert (await sink.done()).code is Code.DEADLINE_EXCEEDED
        assert (await ask(worker, request("after", PROMPT, 4))).tokens == expected(PROMPT, 4)

    talk(agg.address, conversation)


def test_a_flood_of_events_is_counted_and_told_to_subscribers(agg: Process) -> None:
    """The engine's buffer holds four: what it dropped is a gap, and what was known of it is void."""

    async def conversation(worker: WorkerClient) -> None:
        cleared = anyio.Event()

        class Subscriber:
            def message(self, data: bytes, /) -> None:
                batch = oe.SubscribeKvEventsResponse.FromString(data).batch
                if batch.sequence_number and any(
                    event.HasField("all_blocks_cleared") for event in batch.events
                ):
                    cleared.set()

            def finish(self, status: object, /) -> None:
                """The test has what it wanted."""

        wanted = oe.SubscribeKvEventsRequest(start_sequence_number=0)
        call = worker.kv_events(wanted.SerializeToString(), (), Subscriber())
        async with anyio.create_task_group() as tasks:
            for n in range(30):
                prompt = [1000 + n, *PROMPT]
                tasks.start_soon(ask, worker, request(f"flood-{n}", prompt, 40))
        await cleared.wait()
        call.cancel()

    talk(agg.address, conversation)
    assert sample(agg, "trtllm_kv_event_id_gap_events_total") > 0
    assert sample(agg, "trtllm_kv_event_buffer_capacity") == 4


def test_a_prefill_without_handoff_is_an_answer_and_parks_nothing(tmp_path: Path) -> None:
    with trtllm_worker(tmp_path, "prefill") as prefill:
        prefill.wait_ready()

        async def conversation(worker: WorkerClient) -> None:
            leg = prefill_leg(faulty(Fault.NO_HANDOFF).SerializeToString(), "p")
            sink = await ask(worker, leg)
            assert sink.events == ["token", "finished"]
            assert (await worker.load(oe.GetLoadRequest())).active_kv_sessions == 0

        talk(prefill.address, conversation)


# --- the end ---------------------------------------------------------------------------------------

# A busy machine may take as long for a check of an engine that works.
QUICK_CHECKS = [("--health-check-interval", "0.1", "--health-check-timeout", "2")]
QUICK_CHECKS *= is_long_run()


@pytest.mark.parametrize(
    ("fault", "version", "options"),
    [
        (Fault.DIE, NEWEST, ()),
        *((Fault.QUIT, version, ()) for version in VERSIONS),
        *((Fault.CHECK_HANGS, NEWEST, options) for options in QUICK_CHECKS),
    ],
)
def test_the_death_of_the_engine_ends_every_request_and_the_process(
    tmp_path: Path, fault: Fault, version: str, options: tuple[str, ...]
) -> None:
    """HEALTH-01, w05: with what it says, what its process says, or what it does not say any more.

    The double's own shutdown would wait for dead ranks for ever.
    """
    slow = {"time_scale": 20.0}
    with trtllm_worker(tmp_path, "agg", *options, version=version, settings=slow) as worker:
        worker.wait_ready()

        async def conversation(client: WorkerClient) -> None:
            running, faulty_one = KeepingSink(), KeepingSink()
            start(client, request("running", PROMPT, 5000).SerializeToString(), running)
            await running.at_least(1)
            start(client, faulty(fault).SerializeToString(), faulty_one)
            for sink, retryable in ((running, False), (faulty_one, True)):
                await sink.done()
                assert sink.events[-1] == "error"
                error = sink.messages[-1].error
                # What has sent nothing can be had elsewhere.
                assert (error.code, error.retryable) == (oe.ERROR_CODE_INTERNAL, retryable)

        talk(worker.address, conversation)
        assert worker.popen.wait(HANG_S) == 1
        # By a result, which in the newest version tells of a process that has quit, or by the watch.
        told = fault is Fault.DIE or (fault is Fault.QUIT and version == NEWEST)
        assert logged(worker, "engine.fatal" if told else "engine.dead")


def unreadable() -> oe.KvSessionRef:
    """A session whose every field can be read, and whose state is none."""
    session = oe.KvSessionRef(session_id="7")
    state = base64.b64encode(b"\1 no state of any engine").decode()
    session.attributes_struct.update({"opaque_state": state, "first_gen_tokens": [5]})
    return session


@pytest.mark.parametrize("version", VERSIONS)
def test_w05_a_malformed_handoff_ends_the_engine_of_a_worker_without_a_key_which_warns(
    tmp_path: Path, version: str
) -> None:
    with trtllm_worker(tmp_path, "decode", version=version) as worker:
        worker.wait_ready()
        eventually(lambda: logged(worker, "engine.ready"), "the log is written")
        (warning,) = logged(worker, "handoff.unsealed")
        assert warning["level"] == "WARNING"
        assert "--handoff-key-file" in warning["advice"]

        async def conversation(client: WorkerClient) -> None:
            sink = await resume(client, request("r", PROMPT, 4), unreadable())
            assert sink.events == ["error"]
            assert sink.messages[0].error.code == oe.ERROR_CODE_KV_TRANSFER_FAILED
            assert sink.messages[0].error.retryable

        talk(worker.address, conversation)
        assert worker.popen.wait(HANG_S) == 1


def test_w05_a_worker_with_a_key_refuses_a_malformed_handoff_and_serves_on(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    sealed = ("--handoff-key-file", str(tmp_path / "key"))
    with (
        trtllm_worker(tmp_path, "prefill", *sealed, name="p") as prefill,
        trtllm_worker(tmp_path, "decode", *sealed, name="d") as decode,
    ):
        prefill.wait_ready()
        decode.wait_ready()

        async def conversation(client: WorkerClient) -> None:
            sink = await resume(client, request("r", PROMPT, 4), unreadable())
            assert (sink.code, sink.messages) == (Code.INVALID_ARGUMENT, [])
            async with connect_worker(prefill.address) as other:
                session = await hand_off(other, request("s", PROMPT, 4))
            sink = await resume(client, request("s", PROMPT, 4), session)
            assert sink.tokens == expected(PROMPT, 4)

        talk(decode.address, conversation)
        for worker in (prefill, decode):
            eventually(lambda at=worker: logged(at, "engine.ready"), "the log is written")
        assert not logged(prefill, "handoff.unsealed")
        assert not logged(decode, "handoff.unsealed")


@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_w05_a_prefill_worker_that_its_engine_would_not_survive_does_not_start(
    tmp_path: Path, version: str
) -> None:
    """The rules believe --engine-version; the constructed engine is asked, too."""
    said = ("--engine-version", "1.3")
    engine = {"disable_overlap_scheduler": False}
    with trtllm_worker(tmp_path, "prefill", *said, version=version, **engine) as worker:
        assert worker.popen.wait(HANG_S) == 2
        assert "set disable_overlap_scheduler: true" in worker.stderr()
        assert worker.rest_of_stdout() == b""


def test_a_prefill_worker_that_was_told_to_end_has_its_handoff_fetched(tmp_path: Path) -> None:
    drain = ("--drain", str(HANG_S))
    with (
        trtllm_worker(tmp_path, "prefill", *drain, name="p") as prefill,
        trtllm_worker(tmp_path, "decode", *ANYWHERE, name="d") as decode,
    ):
        prefill.wait_ready()
        decode.wait_ready()

        async def conversation(worker: WorkerClient) -> None:
            session = await hand_off(worker, request("r", PROMPT, 4))
            prefill.popen.terminate()
            not_ready = oe.HEALTH_STATE_NOT_READY
            while (await worker.health(oe.HealthRequest())).state != not_ready:
                await anyio.lowlevel.checkpoint()
            async with connect_worker(decode.address) as other:
                sink = await resume(other, request("r", PROMPT, 4), session)
            assert sink.tokens == expected(PROMPT, 4)

        talk(prefill.address, conversation)
        # It cannot know that, and stays until the handoff's time limit; a second signal ends it at once.
        assert prefill.popen.poll() is None
        prefill.popen.terminate()
        assert prefill.popen.wait(HANG_S) == -signal.SIGTERM
        # The client may have all of its answer before the engine's last result was measured.
        eventually(lambda: sample(decode, "trtllm_kv_transfer_success_total"), "a fetch is counted")
        assert sample(decode, "trtllm_kv_transfer_success_total") == 1
        assert sample(decode, "trtllm_kv_transfer_bytes_sum") > 0
        assert sample(decode, "trtllm_request_success_total") == 1


# --- the other modes -------------------------------------------------------------------------------


def test_a_worker_that_encodes_says_what_it_does_not_serve(tmp_path: Path) -> None:
    with trtllm_worker(tmp_path, "encode") as worker:
        worker.wait_ready()
        assert worker.ready["role"] == "encode"

        async def conversation(client: WorkerClient) -> None:
            assert (await client.health(oe.HealthRequest())).state == oe.HEALTH_STATE_READY
            info = await client.server_info()
            assert info.engine_role == oe.ENGINE_ROLE_UNSPECIFIED
            assert info.extra["slagate_role"] == "encode"
            sink = await ask(client, request("r", PROMPT))
            assert (sink.code, sink.messages) == (Code.UNIMPLEMENTED, [])

        talk(worker.address, conversation)
        assert worker.terminate() == 0


def test_autodeploy_gets_only_what_it_has_arguments_for(tmp_path: Path) -> None:
    """The double's refuses the others, as AutoDeploy does; each one left out is named."""
    options = ("--backend", "_autodeploy", "--pipeline-parallel-size", "1")
    with trtllm_worker(tmp_path, "agg", *options) as worker:
        worker.wait_ready()
        assert "pipeline_parallel_size" in str(logged(worker, "engine_args.finding"))


# --- the check of itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({"time_scale": 0.0}, 0, "handoff to itself │ ok"),
        ({"init": "fail"}, 1, "constructor failed: the log above has the engine's own error"),
    ],
)
def test_a_self_check_prints_a_table_and_listens_nowhere(
    tmp_path: Path, settings: dict[str, Any], status: int, said: str
) -> None:
    with trtllm_worker(tmp_path, "prefill", "--self-check", settings=settings) as worker:
        assert worker.popen.wait(HANG_S) == status
        table = worker.rest_of_stdout().decode()
        assert said in table
        assert ("RuntimeError: CUDA" in table) == bool(status)
        assert not logged(worker, "worker.listening")
        assert logged(worker, "engine.phase"), "progress is told"
