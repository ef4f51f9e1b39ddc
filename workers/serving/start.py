"""From an installed package to an engine that has answered: the phases of a start, told as they pass."""

import logging
from collections.abc import Awaitable, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

import anyio

from slagate.workers.handoff.seal import read_key
from slagate.workers.runtime.errors import UsageError
from slagate.workers.runtime.waiting import run_in_daemon_thread
from slagate.workers.serving.options import TrtllmOptions
from slagate.workers.serving.starting import StartingWorker
from slagate.workers.trtllm.engine import setting
from slagate.workers.trtllm.package import EnginePackage, as_usage, load_package, shut_down
from slagate.workers.trtllm.server_info import ROLES, WorkerIdentity

log = logging.getLogger(__name__)

_T = TypeVar("_T")

NO_BACKEND = "DEFAULT"


class Started(NamedTuple):
    """A constructed engine, and what it is."""

    package: EnginePackage
    llm: Any
    identity: WorkerIdentity


class Phases:
    """The phase that a start is in, for health and logs, every few seconds."""

    def __init__(self, starting: StartingWorker, *, every_s: float) -> None:
        self._starting = starting
        self._every_s = every_s
        self._started_s = anyio.current_time()
        self.begin(starting.phase)

    @property
    def total_s(self) -> float:
        """Since the first phase began."""
        return anyio.current_time() - self._started_s

    def begin(self, phase: str) -> None:
        """The one before has ended."""
        self._starting.phase = phase
        self._phase_s = anyio.current_time()
        self._tell("engine.phase")

    async def through(self, work: Awaitable[_T], *, until: Sequence[anyio.Event]) -> _T | None:
        """What `work` returns, or None once one of these events is set; log lines say how long it takes.

        A thread that it waits for goes on and ends with the process. Raises what it raises.
        """
        result: _T | None = None
        error: Exception | None = None
        async with anyio.create_task_group() as tasks:

            async def give_up(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            for event in until:
                tasks.start_soon(give_up, event)
            tasks.start_soon(self._go_on)
            try:
                result = await work
            except Exception as raised:  # noqa: BLE001 - raised again, outside: a group would wrap it
                error = raised
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        return result

    async def _go_on(self) -> None:
        while True:
            await anyio.sleep(self._every_s)
            self._tell("engine.starting")

    def _tell(self, event: str) -> None:
        now_s = anyio.current_time()
        seconds = round(now_s - self._phase_s, 1)
        about = {"phase": self._starting.phase, "seconds": seconds}
        log.info(event, extra={**about, "total_seconds": round(self.total_s, 1)})


async def start_engine(options: TrtllmOptions, *, instance_id: str, phases: Phases) -> Started:
    """Import the package and construct the engine, both on threads: the loop goes on meanwhile.

    Raises `UsageError` for what the package or the arguments are wrong about, and whatever else the
    constructor raises.
    """
    package = await run_in_daemon_thread(load_package)
    if options.logits.is_used and package.LogitsProcessor is None:
        raise UsageError(f"--logits-processor: tensorrt_llm {package.version} has none")
    phases.begin("engine")
    llm = await run_in_daemon_thread(as_usage(lambda: package.LLM(**options.args.values)))
    try:
        identity = identity_of(llm, package, options, instance_id=instance_id)
        options.logits.check(end_id=identity.end_id, vocab_size=identity.vocab_size)
    except UsageError:
        await shut_down(llm, limit_s=options.shutdown_limit_s)
        raise
    return Started(package, llm, identity)


def identity_of(
    llm: Any, package: EnginePackage, options: TrtllmOptions, *, instance_id: str
) -> WorkerIdentity:
    """What the worker says it is. Raises `UsageError` where the end of a text cannot be known."""
    tokenizer = getattr(llm.tokenizer, "tokenizer", None)
    end_id = options.end_id
    if end_id is None:
        end_id = getattr(tokenizer, "eos_token_id", None)
    if end_id is None:
        raise UsageError("--end-id is needed: the engine has no tokenizer that knows it")
    transceiver = getattr(llm.args, "cache_transceiver_config", None)
    hands_off = transceiver is not None and options.role != "agg"
    return WorkerIdentity(
        role=ROLES[options.role],
        model=options.served_name,
        instance_id=instance_id,
        engine_version=package.version,
        transfer_backend=setting(transceiver, "backend") or NO_BACKEND if hands_off else "",
        tensor_parallel_size=getattr(llm.args, "tensor_parallel_size", 1),
        end_id=end_id,
        engine_knows_end=options.end_id is None,
        # With the tokens that were added to it, which `vocab_size` of a tokenizer leaves out.
        vocab_size=len(tokenizer) if isinstance(tokenizer, Sized) else None,
    )


def handoff_key(options: TrtllmOptions) -> bytes | None:
    """The key that seals handoffs, if any. Raises `UsageError`."""
    return read_key(options.handoff_key_file)
