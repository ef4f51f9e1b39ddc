"""A gateway of two processes and its workers, and how tests look at it and keep it busy."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from support.engine.tokens import expected
from support.gateway.foreign_client import Answer, Client, endless, read
from support.gateway.processes import Cluster, Gateway, Pool, cluster, eventually, fleet_config
from support.limits import HANG_S

N_CLIENTS = 20


@contextmanager
def two_processes(folder: Path) -> Iterator[Cluster]:
    """Two aggregated workers behind two processes."""
    # Slow ones: what streams for seconds, while processes are killed and end, takes few tokens.
    slow = ("--time-scale", "4")
    with cluster(folder, {"a": Pool("agg", 2, slow)}, "--processes", "2") as running:
        yield running


def config_of(of: Cluster) -> dict[str, Any]:
    return fleet_config({"a": ("agg", of.addresses("a"))})


def ready_lines(of: Gateway) -> list[dict[str, Any]]:
    """What the log says so far of processes that serve: lines come late, several at once."""
    whole, _, _ = of.process.stderr().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if '"process.ready"' in line]


def pids(of: Gateway) -> dict[int, int]:
    """The newest process of each number."""
    found: dict[int, int] = {}

    def is_told() -> bool:
        found.update({each["process_number"]: each["pid"] for each in ready_lines(of)})
        return len(found) == n_running(of)

    eventually(is_told, "the log says which processes there are")
    return found


def n_running(of: Gateway) -> int:
    return int(of.metrics("slagate_processes")[""])


def kill(of: Gateway, number: int) -> None:
    """SIGKILL one process; the gateway has seen its end when this returns."""

    def n_ended() -> float:
        return of.metrics("slagate_process_restarts_total")[""]

    before = n_ended()
    os.kill(pids(of)[number], signal.SIGKILL)
    eventually(lambda: n_ended() > before, "it has ended")


def is_whole_again(of: Gateway) -> None:
    """Wait until both processes run."""
    eventually(lambda: n_running(of) == 2, "it is back")


class Streams:
    """Calls that have their first token, spread over connections, and so over processes."""

    def __init__(self, address: str, n_calls: int, n_tokens: int, stack: ExitStack) -> None:
        clients = [stack.enter_context(Client(address)) for _ in range(N_CLIENTS)]
        self.n_tokens = n_tokens
        self.prompts = [[600 * at + n for n in range(200)] for at in range(n_calls)]
        self.calls = [
            clients[at % N_CLIENTS].start(endless(tokens, n_tokens, request_id=f"s{at}"))
            for at, tokens in enumerate(self.prompts)
        ]
        self.firsts = [next(call) for call in self.calls]
        self.n_read = [0] * n_calls  # messages behind the first one
        self.ended: dict[int, Answer] = {}
        self._threads = [threading.Thread(target=self._read, args=(at,)) for at in range(n_calls)]
        for thread in self._threads:
            thread.start()

    def _read(self, at: int) -> None:
        self.ended[at] = read(_Counted(self.calls[at], self.n_read, at))

    def go_on(self, those: Iterable[int]) -> None:
        """Wait until each of those has had one more message."""
        marks = {at: self.n_read[at] for at in those}

        def all_have() -> bool:
            return all(self.n_read[at] > n_before for at, n_before in marks.items())

        eventually(all_have, "streams go on")

    def cancel(self, those: Iterable[int]) -> None:
        for at in those:
            self.calls[at].cancel()

    def join(self) -> "Counter[grpc.StatusCode]":
        """Read all to their ends; how many ended how."""
        for thread in self._threads:
            thread.join(HANG_S)
        for at, answer in self.ended.items():
            first = [token.token_id for token in self.firsts[at].token.tokens]
            tokens = first + answer.tokens
            assert tokens == expected(self.prompts[at], len(tokens))
            assert len(tokens) == self.n_tokens or answer.code is not grpc.StatusCode.OK
        return Counter(answer.code for answer in self.ended.values())


class _Counted:
    """A call whose messages are counted as they are read."""

    def __init__(self, call: Any, counts: list[int], at: int) -> None:
        self._call = call
        self._counts = counts
        self._at = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Iterator[Any]:
        for message in self._call:
            self._counts[self._at] += 1
            yield message
