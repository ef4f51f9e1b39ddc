"""`--transport`: how KV caches move."""

from typing import Annotated

import typer

from slagate.router.command import fail
from slagate.workers.kv_choice import TRANSPORTS

Transport = Annotated[
    str,
    typer.Option(
        help="How the KV cache moves between workers: nixl, shm (shared memory), or auto: nixl where it "
        "works, else shm.",
    ),
]


def check_transport(transport: str) -> None:
    """End the command unless `transport` is one there is."""
    if transport not in TRANSPORTS:
        fail(f"--transport must be one of {', '.join(TRANSPORTS)} (got {transport!r})")
