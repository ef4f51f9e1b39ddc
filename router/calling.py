"""Calls of the commands to a server, and what is said where one fails: one place for all of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.router.command import CallFailed
from slagate.router.refusals import why_not
from slagate.workers.aside import aside
from slagate.workers.client import GrpcWorker, connect_worker
from slagate.workers.control_channel import channel_to
from slagate.workers.errors import WorkerError
from slagate.workers.tls import ClientTls
from slagate.workers.tls_files import TlsFiles
from slagate.workers.worker import Status


@asynccontextmanager
async def admin_at(target: str, tls: TlsFiles | None) -> AsyncIterator[Any]:
    """The admin service of a gateway, in plaintext without `tls`; a call that fails is a `CallFailed`."""
    side = _side(tls)
    where = "the gateway's admin listener (`slagate serve --admin`)"
    async with channel_to(target, side) as channel, _explaining(target, side, where):
        yield gw_grpc.GatewayStub(channel)


@asynccontextmanager
async def engine_at(target: str, tls: TlsFiles | None) -> AsyncIterator[GrpcWorker]:
    """A gateway or a worker, as clients see it; else as `admin_at`."""
    side = _side(tls)
    where = "a gateway's or a worker's listener for clients (--listen)"
    async with connect_worker(target, tls=side) as engine, _explaining(target, side, where):
        yield engine


def _side(tls: TlsFiles | None) -> ClientTls | None:
    return None if tls is None else ClientTls("command", tls)


@asynccontextmanager
async def _explaining(target: str, tls: ClientTls | None, where: str) -> AsyncIterator[None]:
    """`where` is what `target` should be."""
    try:
        yield
        return
    except grpc.aio.AioRpcError as error:
        status = Status(error.code(), error.details() or "")
    except WorkerError as error:
        status = error.status
        # A command may have two of them, with the same options, and be in the block of both.
        target = error.address or target
    words = status.message
    if status.code is grpc.StatusCode.UNAVAILABLE:
        words = await aside(lambda: _why(target, tls)) or words
    elif status.code is grpc.StatusCode.UNIMPLEMENTED:
        words = f"{words} Is {target} {where}?"
    raise CallFailed(f"{status.code.name}: {words}")


def _why(target: str, tls: ClientTls | None) -> str:
    """As `why_not`; what it stumbles over is no error in place of the one that it was to explain."""
    try:
        return why_not(target, tls)
    except Exception:  # noqa: BLE001 - the other end may say and show anything
        return ""
