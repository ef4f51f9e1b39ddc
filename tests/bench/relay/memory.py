"""Resident memory of a relay over many streams, and over many that their clients cancel."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.relay.programs import Cores, Load, compiled, files_of, rss_bytes, workers
from bench.relay.variants import VARIANTS
from bench.relay.workloads import Workload

N_STREAMS = 200_000
N_CANCELLED = 20_000
N_SAMPLES = 10

STREAMS = Workload(about="1k prompt, 16 messages, saturated")
CANCELLED = Workload(about="the same, cancelled behind 3 messages", in_flight=10, pace_us=2000)
CANCEL_AFTER = 3
CANCEL_CONNECTIONS = 20
"""As many as it takes: a server ends connections whose client resets more than 100 streams a second."""

MOST_GROWTH_BYTES = 2 << 20
"""From the median of the first three samples to that of the last three: 10 bytes a stream are 2 MB."""


def measure(variant: str, cores: Cores, folder: Path) -> dict[str, Any]:
    """MiB after each tenth of the streams. Raises `RuntimeError` where a stream is not as it must be."""
    streams = _samples(variant, STREAMS, N_STREAMS, cores, folder / "streams", connections=4)
    cancelled = _samples(
        variant,
        CANCELLED,
        N_CANCELLED,
        cores,
        folder / "cancelled",
        connections=CANCEL_CONNECTIONS,
        cancel_after=CANCEL_AFTER,
    )
    found = {f"{N_STREAMS} streams": streams, f"{N_CANCELLED} cancelled streams": cancelled}
    growth_bytes = {
        what: round(statistics.median(few[-3:]) - statistics.median(few[:3]))
        for what, few in found.items()
    }
    return {
        "variant": variant,
        "rss_mib": {what: [round(each / 2**20, 2) for each in few] for what, few in found.items()},
        "checks": [
            {
                "what": f"memory, {what}: growth in bytes",
                "found": growth,
                "bound": MOST_GROWTH_BYTES,
                "holds": growth <= MOST_GROWTH_BYTES,
            }
            for what, growth in growth_bytes.items()
        ],
    }


def _samples(
    variant: str, workload: Workload, total: int, cores: Cores, folder: Path, **options: object
) -> Sequence[int]:
    """Bytes after each tenth of `total` streams."""
    folder.mkdir(parents=True)
    files = files_of(workload, folder)
    program = compiled("load", folder.parent)
    samples = []
    with (
        workers(workload, folder, cores.others) as backends,
        VARIANTS[variant](workload, folder, cores.measured, backends) as proxy,
    ):
        for _ in range(N_SAMPLES):
            Load(
                program,
                proxy.addresses,
                cores.others,
                {
                    "requests": files.requests,
                    "salt": files.salt_at,
                    "messages": workload.n_messages,
                    "bytes": files.answer_bytes,
                    "in_flight": workload.in_flight,
                    "total": total // N_SAMPLES,
                    "limit": 300,
                    **options,
                },
            ).found()
            samples.append(rss_bytes(proxy.pid))
    return samples
