"""Interleaved rounds of one workload over several variants."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.relay.programs import (
    Cores,
    Files,
    Load,
    compiled,
    cpu_s,
    files_of,
    workers,
)
from bench.relay.proxies import Proxy
from bench.relay.variants import VARIANTS
from bench.relay.workloads import Workload

WARM_UP_S = 0.5
WARM_UP_MESSAGES = 20

IDLE_S = 1.0

SETTLED_S = 0.5
"""From the beginning of a paced stream: the request was dealt with, what follows is messages."""

LATE_RATIO = 1.1
"""Of the time that paced streams took to the time that they should: above it the pace was not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to measure."""

    n_rounds: int
    seconds: float  # of a row
    connections: int  # of the client
    packed: bool
    cores: Cores
    folder: Path


def rounds(
    name: str, workload: Workload, variants: Sequence[str], plan: Plan
) -> list[dict[str, Any]]:
    """A row for each variant and round. Raises `RuntimeError` for an answer that is not as it must be."""
    folder = plan.folder / name
    folder.mkdir()
    workload = workload.lasting(plan.seconds)
    files = files_of(workload, folder)
    rows = []
    with ExitStack() as stack:
        backends = stack.enter_context(
            workers(workload, folder, plan.cores.others, packed=plan.packed)
        )
        proxies = {
            variant: stack.enter_context(
                VARIANTS[variant](workload, folder, plan.cores.measured, backends)
            )
            for variant in variants
        }
        bench = _Bench(workload, files, plan, compiled("load", plan.folder))
        for proxy in proxies.values():
            bench.warm_up(proxy)
        idle = _idle(proxies)
        for number in range(plan.n_rounds):
            # One way and then the other: what drifts does not always favour the same one.
            for variant in variants if number % 2 == 0 else reversed(variants):
                row = bench.row(proxies[variant])
                # Of a gateway that looks at its workers each second, say: no work for a request.
                idle_us = (
                    idle[variant] / row["core_share"] * row["cpu_us"] if idle[variant] else 0.0
                )
                rows.append(
                    {
                        "workload": name,
                        "variant": variant,
                        "round": number,
                        "idle_us": round(idle_us, 3),
                        **row,
                    }
                )
    return rows


def _idle(proxies: Mapping[str, Proxy]) -> dict[str, float]:
    """The share of a core that each of them uses when there is nothing to do."""
    before_s = {name: cpu_s(proxy.pid) for name, proxy in proxies.items()}
    time.sleep(IDLE_S)
    return {name: (cpu_s(proxy.pid) - before_s[name]) / IDLE_S for name, proxy in proxies.items()}


class _Bench:
    def __init__(self, workload: Workload, files: Files, plan: Plan, program: Path) -> None:
        self._workload = workload
        self._plan = plan
        self._program = program
        self._options: dict[str, object] = {
            "requests": files.requests,
            "salt": files.salt_at,
            "messages": workload.n_messages,
            "bytes": files.answer_bytes,
            "in_flight": workload.in_flight,
            "limit": plan.seconds + 60,
        }

    def warm_up(self, proxy: Proxy) -> None:
        if self._workload.pace_us:
            self._load(proxy, total=self._workload.in_flight, cancel_after=WARM_UP_MESSAGES).found()
        else:
            self._load(proxy, seconds=WARM_UP_S).found()

    def row(self, proxy: Proxy) -> dict[str, Any]:
        busy = os.getloadavg()[0]
        row = self._paced(proxy) if self._workload.pace_us else self._whole(proxy)
        return row | {"load_average": round(busy, 2)}

    def _whole(self, proxy: Proxy) -> dict[str, Any]:
        """CPU over a whole run."""
        rate = {"rate": self._workload.rate} if self._workload.rate else {}
        before_s = cpu_s(proxy.pid)
        found = self._load(proxy, seconds=self._plan.seconds, **rate).found()
        used_s = cpu_s(proxy.pid) - before_s
        return {
            "cpu_us": round(used_s / found["completed"] * 1e6, 3),
            "core_share": round(used_s / found["elapsed_s"], 4),
            **found,
        }

    def _paced(self, proxy: Proxy) -> dict[str, Any]:
        """CPU of the middle of a run, in which there are messages only, so many in that time."""
        load = self._load(proxy, total=self._workload.in_flight)
        time.sleep(SETTLED_S)
        before_s, from_s = cpu_s(proxy.pid), time.perf_counter()
        time.sleep(self._plan.seconds - 2 * SETTLED_S)
        used_s, took_s = cpu_s(proxy.pid) - before_s, time.perf_counter() - from_s
        found = load.found()
        if found["elapsed_s"] > self._plan.seconds * LATE_RATIO:
            raise RuntimeError(f"the pace was not kept: {found}")
        n_messages = took_s / self._workload.pace_us * 1e6 * self._workload.in_flight
        return {
            "cpu_us": round(used_s / n_messages * 1e6, 3),
            "core_share": round(used_s / took_s, 4),
            **found,
        }

    def _load(self, proxy: Proxy, **options: object) -> Load:
        n_connections = max(self._plan.connections, len(proxy.addresses))
        return Load(
            self._program,
            proxy.addresses,
            self._plan.cores.others,
            {**self._options, "connections": n_connections, **options},
        )
