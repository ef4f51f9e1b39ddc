"""Every packaged engine configuration starts on each version that it names, and serves in its role.

Most are started in this process by the functions that a worker process starts its engine with
(`start_engine`, `worker_over`), over the package double; a few as the processes themselves.
"""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.resources import files
from pathlib import Path

import anyio
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.client.client import connect_worker
from slagate.workers.engine_args.build import build_engine_args
from slagate.workers.engine_args.yaml_text import engine_configs
from slagate.workers.runtime.usage import UsageError
from slagate.workers.serving.start import Phases, StartingWorker, start_engine, worker_over
from slagate.workers.sim.api import VERSIONS
from slagate.workers.trtllm.encode import EncodeWorker, start_encoder
from slagate.workers.trtllm.package import shut_down
from slagate.workers.worker import Worker
from support.engine.installed import installed, options_of
from support.engine.process import environment
from support.engine.workers import MODEL, expected, request
from support.gateway.processes import LOOPBACK, Process, starting
from support.limits import HANG_S
from support.worker.contract import ask, hand_off, resume

PROMPT = list(range(1, 101))
SETTINGS = {"time_scale": 0.0, "n_gpus": 16}


def text_of(name: str) -> str:
    return files("slagate.configs").joinpath("engines", f"{name}.yaml").read_text()


def versions_of(name: str) -> list[str]:
    """The versions in the head of the file."""
    (line,) = re.findall(r"^# TensorRT-LLM: (.*)$", text_of(name), re.MULTILINE)
    return re.findall(r"\d+\.\d+(?:rc)?", line)


def role_of(name: str) -> str:
    return re.split(r"[/-]", name)[-1]


CASES = [
    (name, version)
    for name in engine_configs()
    if role_of(name) != "decode"  # which is started with its prefill
    for version in versions_of(name)
]


@asynccontextmanager
async def started(name: str, file: Path | None = None) -> AsyncIterator[Worker]:
    """A worker with this configuration, or the one in `file`, over the installed double."""
    role, extra = role_of(name), file or Path(name)
    args = build_engine_args(role=role, cli={"model": MODEL}, extra=extra, override=None)
    options = options_of(args)
    if role == "encode":
        encoder = EncodeWorker(await start_encoder(args.values), model=MODEL, instance_id=name)
        yield encoder
        assert not await encoder.shut_down(HANG_S)
        return
    phases = Phases(StartingWorker("import"), every_s=HANG_S)
    engine = await start_engine(options, instance_id=name, phases=phases)
    async with anyio.create_task_group() as tasks:
        worker = worker_over(engine, options, tasks=tasks, handoff_key=None)
        assert await worker.warm_up(HANG_S, on_canary=lambda: None) == ""
        yield worker
        tasks.cancel_scope.cancel()
    assert not await shut_down(engine.llm, limit_s=HANG_S)


async def serve_a_request(name: str, first: Worker, second: Worker | None) -> None:
    """In the roles of the workers; `second` is the decode worker of a pair."""
    whole = request("r", PROMPT)
    if role_of(name) == "encode":
        assert (await first.health(oe.HealthRequest())).state == oe.HEALTH_STATE_READY
    elif second is None:
        assert (await ask(first, whole)).tokens == expected(PROMPT, 8)
    else:
        sink = await resume(second, whole, await hand_off(first, whole))
        assert sink.tokens == expected(PROMPT, 8)


def test_a_configuration_names_versions_that_a_pair_has_in_common() -> None:
    for name in engine_configs():
        assert versions_of(name) == [each for each in VERSIONS if each in versions_of(name)] != []
        if role_of(name) == "prefill":
            assert versions_of(name) == versions_of(name.removesuffix("prefill") + "decode")


@pytest.mark.parametrize(("name", "version"), CASES)
def test_t2_1_a_configuration_serves_on_each_version_that_it_names(name: str, version: str) -> None:
    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with started(name) as first:
                if role_of(name) != "prefill":
                    await serve_a_request(name, first, None)
                    return
                async with started(name.removesuffix("prefill") + "decode") as second:
                    await serve_a_request(name, first, second)

    with installed(version, **SETTINGS):
        anyio.run(main)


@pytest.mark.parametrize("version", ["1.1", "1.2"])
@pytest.mark.parametrize("role", ["agg", "prefill", "decode"])
def test_w08_drafting_has_other_names_in_the_versions_that_its_files_leave_out(
    role: str, version: str, tmp_path: Path
) -> None:
    """What the engine says of the names of now is told as the mistake of an argument."""
    older = tmp_path / "older.yaml"
    text = text_of(f"llama4-eagle/{role}").replace("decoding_type: Eagle3", "decoding_type: Eagle")
    older.write_text(text.replace("speculative_model:", "speculative_model_dir:"))

    async def main() -> None:
        with pytest.raises(UsageError, match="Invalid decoding type: Eagle3"):
            async with started(f"llama4-eagle/{role}"):
                pass
        with anyio.fail_after(HANG_S):
            async with started(f"llama4-eagle/{role}", older) as worker:
                assert (await worker.health(oe.HealthRequest())).state == oe.HEALTH_STATE_READY

    with installed(version, **SETTINGS):
        anyio.run(main)


@contextmanager
def process(folder: Path, name: str, version: str) -> Iterator[Process]:
    """A worker process with this configuration, from its first moment on."""
    given = ["worker", "trtllm", "--role", role_of(name), "--model", MODEL, "--insecure"]
    given += ["--listen", f"{LOOPBACK}:0", "--drain", "0", "--extra-engine-args", name]
    environ = environment(version, **SETTINGS)
    with starting(role_of(name), given, folder, environ) as running:
        yield running


@pytest.mark.parametrize(
    ("name", "version"), [("qwen3/prefill", "1.1"), ("deepseek-r1/wide-ep-prefill", "1.4rc")]
)
def test_t2_1_a_pair_of_configurations_serves_as_processes(
    tmp_path: Path, name: str, version: str
) -> None:
    async def main(first: str, second: str) -> None:
        with anyio.fail_after(HANG_S):
            async with connect_worker(first) as prefill, connect_worker(second) as decode:
                await serve_a_request(name, prefill, decode)

    with (
        process(tmp_path, name, version) as prefill,
        process(tmp_path, name.removesuffix("prefill") + "decode", version) as decode,
    ):
        prefill.wait_ready()
        decode.wait_ready()
        anyio.run(main, prefill.address, decode.address)
