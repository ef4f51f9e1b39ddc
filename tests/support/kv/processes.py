"""Two sides of KV transfers, here or in a process of their own, driven by the same few requests.

A request is a dict with an "op"; the answer has "error" (a class name, or "") and "text". Blocks are told
by a seed, so that only their digest has to travel back. `python -m support.kv.processes JSON` is the
process: requests on stdin, answers on stdout, one JSON object a line; it ends with stdin.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slagate.workers.kv_transfer.nixl import ucx as kv_ucx
from slagate.workers.kv_transfer.nixl.nixl import NixlTransport
from slagate.workers.kv_transfer.transport import Blocks, KvTransferError, KvTransport
from support.limits import HANG_S

ANSWER_LIMIT_S = HANG_S
LOOK_S = 0.01
BLOCK_BYTES = 256
TESTS = Path(__file__).resolve().parents[2]


def blocks_of(seed: int, n_blocks: int, block_bytes: int = BLOCK_BYTES) -> Blocks:
    """Random blocks, always the same for the same seed."""
    shape = (n_blocks, block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def digest(blocks: Blocks) -> str:
    """Of shape and content."""
    return f"{blocks.shape} {blake2b(np.ascontiguousarray(blocks).data, digest_size=8).hexdigest()}"


def pulled(transport: KvTransport, descriptor: bytes) -> Blocks:
    """What a transport that answers at once gives; raises the error that it gives instead."""
    results: list[Blocks | KvTransferError] = []
    transport.pull(descriptor, results.append)
    (result,) = results
    if isinstance(result, KvTransferError):
        raise result
    return result


class Requests:
    """Carries out requests on a transport, on the running loop's thread."""

    def __init__(self, transport: KvTransport, answer: Callable[[dict[str, Any]], None]) -> None:
        self.transport = transport
        self._answer = answer

    def carry_out(self, request: dict[str, Any]) -> None:
        """Do it; the answer comes now or, to a pull, when it has ended."""
        number = request["number"]
        if request["op"] == "pull":
            descriptor = bytes.fromhex(request["descriptor"])
            self.transport.pull(descriptor, lambda result: self._pull_ended(number, result))
            return
        answer = {"number": number, "error": "", "text": ""}
        try:
            answer |= getattr(self, f"_{request['op']}")(request)
        except KvTransferError as error:
            answer |= {"error": type(error).__name__, "text": str(error)}
        self._answer(answer)

    def _pull_ended(self, number: int, result: Blocks | KvTransferError) -> None:
        if isinstance(result, KvTransferError):
            answer = {"error": type(result).__name__, "text": str(result)}
        else:
            answer = {"error": "", "text": digest(result)}
        self._answer({"number": number, **answer})

    def _export(self, request: dict[str, Any]) -> dict[str, Any]:
        blocks = blocks_of(request["seed"], request["n_blocks"])
        blocks = np.concatenate([blocks_of(0, request.get("n_common", 0)), blocks])
        return {"text": self.transport.export(request["session"], blocks).hex()}

    def _acks(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        return {"sessions": self.transport.acks()}

    def _release(self, request: dict[str, Any]) -> dict[str, Any]:
        self.transport.release(request["session"])
        return {}

    def _state(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        names = ("n_free", "n_slots", "n_quarantined", "n_agents")
        counts = {name: getattr(self.transport, name) for name in names}
        return {"text": self.transport.problem(), **counts}

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        self.transport.close()
        return {}


class Side(Protocol):
    """A transport somewhere."""

    def begin(self, op: str, **fields: Any) -> int:
        """Send a request; its number."""

    def end(self, number: int, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        """Wait for an answer; fails when none comes in time."""


class Here:
    """A transport in this process, on a loop that runs while somebody waits for an answer."""

    def __init__(self, transport: KvTransport) -> None:
        self.transport = transport
        self._loop = asyncio.new_event_loop()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._requests = Requests(transport, self._take)
        self.n_answers = 0

    def begin(self, op: str, **fields: Any) -> int:
        number = len(self._answers)
        self._answers[number] = self._loop.create_future()
        request = {"op": op, "number": number, **fields}
        self._loop.run_until_complete(self._carry_out(request))
        return number

    def end(self, number: int, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        answer = self._answers[number]
        late = self._loop.call_later(limit_s, answer.cancel)
        try:
            return self._loop.run_until_complete(answer)
        finally:
            late.cancel()

    def close(self) -> None:
        self.transport.close()
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        self._loop.close()

    async def _carry_out(self, request: dict[str, Any]) -> None:
        self._requests.carry_out(request)

    def _take(self, answer: dict[str, Any]) -> None:
        self.n_answers += 1
        self._answers[answer["number"]].set_result(answer)


class There:
    """A `NixlTransport` in a process of its own."""

    def __init__(self, name: str, **options: Any) -> None:
        settings = {"worker_name": name, "n_slots": 64, "pull_limit_s": HANG_S, **options}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "support.kv.processes", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=TESTS,
        )
        self._answers: dict[int, dict[str, Any]] = {}
        self._seen: set[int] = set()
        self._n_requests = 0
        self._unread = b""
        self._ready = False

    def begin(self, op: str, **fields: Any) -> int:
        self.wait_ready()
        assert self.popen.stdin is not None
        self._n_requests += 1
        line = json.dumps({"op": op, "number": self._n_requests, **fields}) + "\n"
        self.popen.stdin.write(line.encode())
        self.popen.stdin.flush()
        return self._n_requests

    def end(self, number: int, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        while number not in self._answers:
            self._read(limit_s)
        return self._answers.pop(number)

    def answered(self, number: int) -> bool:
        """Whether the answer is there, without waiting."""
        while self._readable(0):
            self._read(0)
        return number in self._answers

    def is_ready(self) -> bool:
        """Whether its transport is open, without waiting."""
        if not self._ready and self.answered(0):
            self.wait_ready()
        return self._ready

    def wait_ready(self) -> None:
        """Wait until its transport is open."""
        if not self._ready:
            self._ready = True
            self.end(0)

    def freeze(self) -> None:
        """SIGSTOP, and no thread of it runs any more when this returns."""
        self.popen.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.popen.pid}/task")
        while any(not _stopped(thread / "stat") for thread in threads.iterdir()):
            os.sched_yield()

    def thaw(self) -> None:
        """SIGCONT."""
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, dead when this returns."""
        self.popen.kill()
        self.popen.wait()
        self._hang_up()

    def unharmed(self) -> bool:
        """Whether it runs, and its transport is as it was at the start."""
        if self.popen.poll() is not None or _stopped(Path(f"/proc/{self.popen.pid}/stat")):
            return False
        return is_whole(call(self, "state"))

    def finish(self) -> int:
        """End its stdin; the exit status."""
        self._hang_up()
        return self.popen.wait(ANSWER_LIMIT_S)

    def _hang_up(self) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()

    def _readable(self, limit_s: float) -> bool:
        assert self.popen.stdout is not None
        return bool(select.select([self.popen.stdout], [], [], limit_s)[0])

    def _read(self, limit_s: float) -> None:
        assert self.popen.stdout is not None
        chunk = os.read(self.popen.stdout.fileno(), 1 << 16) if self._readable(limit_s) else b""
        assert chunk, f"no answer: exit status {self.popen.poll()}"
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for answer in map(json.loads, lines):
            assert answer["number"] not in self._seen, f"a second answer: {answer}"
            self._seen.add(answer["number"])
            self._answers[answer["number"]] = answer


def _stopped(stat: Path) -> bool:
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def started(*names: str, **options: Any) -> Iterator[list[There]]:
    """Processes, side by side, all ready; whatever is left of them is killed."""
    sides = [There(name, **options) for name in names]
    try:
        for side in sides:
            side.wait_ready()
        yield sides
    finally:
        for side in sides:
            side.kill()


class Stable:
    """Processes that are used again when a test leaves them as it found them: starting one takes long."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._idle: list[There] = []
        self._n_started = 0

    @contextmanager
    def borrow(self, n_sides: int) -> Iterator[list[There]]:
        """Some, all ready."""
        sides = [self._idle.pop() if self._idle else self._start() for _ in range(n_sides)]
        try:
            for side in sides:
                side.wait_ready()
            yield sides
            self._idle += [side for side in sides if side.unharmed()]
        finally:
            for side in sides:
                if side not in self._idle:
                    side.kill()

    def close(self) -> None:
        """End them; none may end with an error."""
        statuses = [side.finish() for side in self._idle]
        assert not any(statuses), statuses

    def _start(self) -> There:
        self._n_started += 1
        return There(f"w{self._n_started}", **self._options)


def is_whole(state: dict[str, Any]) -> bool:
    """Whether no slot is missing and no former agent is left."""
    return (state["n_free"], state["n_agents"]) == (state["n_slots"], 1)


def pause(seconds: float) -> None:
    """Leave the processor to the processes that are asked."""
    select.select([], [], [], seconds)


def call(side: Side, op: str, **fields: Any) -> dict[str, Any]:
    """A request and its answer, which is no error."""
    answer = side.end(side.begin(op, **fields))
    assert not answer["error"], answer
    return answer


def export(
    side: Side, session: int, *, n_blocks: int = 3, seed: int | None = None, n_common: int = 0
) -> str:
    """The descriptor of blocks whose seed is the session's number unless told otherwise.

    In front of them are `n_common` blocks that are the same for all sessions.
    """
    request = {"session": session, "n_blocks": n_blocks, "n_common": n_common}
    return str(call(side, "export", seed=session if seed is None else seed, **request)["text"])


def fetch(side: Side, descriptor: str) -> dict[str, Any]:
    """How a pull ended."""
    return side.end(side.begin("pull", descriptor=descriptor))


def wait_for(side: Side, op: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask until the answer is as wanted; fails with the last one."""
    answer: dict[str, Any] = {}
    for _ in range(round(ANSWER_LIMIT_S / LOOK_S)):
        answer = call(side, op)
        if wanted(answer):
            return answer
        pause(LOOK_S)
    raise AssertionError(f"still {answer}")


def wait_for_acks(side: Side, sessions: list[int]) -> None:
    """Wait until the side has heard that these were pulled, and of no others."""
    heard: list[int] = []

    def all_heard(answer: dict[str, Any]) -> bool:
        heard.extend(answer["sessions"])
        return len(heard) >= len(sessions)

    wait_for(side, "acks", all_heard)
    assert sorted(heard) == sorted(sessions)


class _Unadapted(kv_ucx._Bindings):
    """Bindings of a version that makes its agents in another way than the one this was written for."""

    @property
    def nixlAgent(self) -> Any:
        return self._real.nixlAgent


async def _serve(settings: dict[str, Any]) -> None:
    if settings.pop("unaided", False):
        # Then there is no progress thread: the agent's own thread has to make progress.
        kv_ucx._Bindings = _Unadapted  # type: ignore[misc]
    transport = NixlTransport(block_bytes=BLOCK_BYTES, loopback=True, **settings)
    loop = asyncio.get_running_loop()
    requests = Requests(transport, lambda answer: print(json.dumps(answer), flush=True))
    ended = asyncio.Event()
    unread = b""

    def readable() -> None:
        nonlocal unread
        chunk = os.read(0, 1 << 20)
        if not chunk:
            loop.remove_reader(0)
            ended.set()
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            requests.carry_out(json.loads(line))

    loop.add_reader(0, readable)
    print(json.dumps({"number": 0, "error": "", "text": ""}), flush=True)
    await ended.wait()


if __name__ == "__main__":
    _settings = json.loads(sys.argv[1])
    asyncio.run(_serve(_settings))
