"""Interleaved rounds of one workload over several variants."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.relay.programs import (
    Cores,
    Files,
    Proxy,
    compiled,
    cpu_s,
    files_of,
    load,
    workers,
)
from bench.relay.variants import VARIANTS
from bench.relay.workloads import Workload

CONNECTIONS = 4
"""Of the client."""

WARM_UP_S = 1.0


def rounds(
    name: str,
    workload: Workload,
    variants: Sequence[str],
    *,
    n_rounds: int,
    seconds: float,
    cores: Cores,
    folder: Path,
    packed: bool,
) -> list[dict[str, Any]]:
    """A row for each variant and round. Raises `RuntimeError` for an answer that is not as it must be."""
    folder = folder / name
    folder.mkdir()
    files = files_of(workload, folder)
    rows = []
    with ExitStack() as stack:
        backends = stack.enter_context(workers(workload, folder, cores.others, packed=packed))
        proxies = {
            variant: stack.enter_context(
                VARIANTS[variant](workload, folder, cores.measured, backends)
            )
            for variant in variants
        }
        client = compiled("load", folder.parent)

        def run(proxy: Proxy, run_s: float) -> dict[str, Any]:
            options = _options(workload, files, run_s, len(proxy.addresses))
            return load(client, proxy.addresses, cores.others, options)

        for proxy in proxies.values():
            run(proxy, WARM_UP_S)
        for number in range(n_rounds):
            # One way and then the other: what drifts does not always favour the same one.
            for variant in variants if number % 2 == 0 else reversed(variants):
                proxy = proxies[variant]
                before_s = cpu_s(proxy.pid) if proxy.pid else 0.0
                found = run(proxy, seconds)
                used_s = cpu_s(proxy.pid) - before_s if proxy.pid else 0.0
                rows.append(
                    {
                        "workload": name,
                        "variant": variant,
                        "round": number,
                        "cpu_us_per_request": round(used_s / found["completed"] * 1e6, 2),
                        "cpu_us_per_message": round(used_s / found["messages"] * 1e6, 3),
                        "core_share": round(used_s / found["elapsed_s"], 3),
                        **found,
                    }
                )
    return rows


def _options(workload: Workload, files: Files, run_s: float, n_addresses: int) -> dict[str, object]:
    options: dict[str, object] = {
        "requests": files.requests,
        "salt": files.salt_at,
        "messages": workload.n_messages,
        "bytes": files.answer_bytes,
        "connections": max(CONNECTIONS, n_addresses),
        "in_flight": workload.in_flight,
        "limit": run_s + 60,
    }
    if workload.rate:
        options["rate"] = workload.rate
    if workload.pace_us:
        # All streams run for the whole time, and a whole number of times.
        stream_s = workload.n_messages * workload.pace_us / 1e6
        options["total"] = workload.in_flight * max(1, round(run_s / stream_s))
    else:
        options["seconds"] = run_s
    return options
