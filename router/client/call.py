"""Calls of the commands to a server, and what is said where one fails: one place for all of them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto.rpc.status import Status
from slagate.router.client.refusals import why_not
from slagate.workers.client.client import GrpcWorker, connect_worker
from slagate.workers.client.control import channel_to
from slagate.workers.errors import WorkerError
from slagate.workers.runtime.usage import UsageError
from slagate.workers.runtime.waiting import run_in_daemon_thread
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ClientTls


class CallFailed(Exception):
    """A server could not be called, or refused the call; the message is for people."""


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
        words = await run_in_daemon_thread(lambda: _why(target, tls)) or words
        if words.startswith("cannot connect") or words.endswith(
            ("does not speak gRPC", "does not speak TLS")
        ):
            words += f"; it should be {where}"
    elif status.code is grpc.StatusCode.UNIMPLEMENTED:
        words = f"{words} Is {target} {where}?"
    raise CallFailed(f"{status.code.name}: {words}")


def _why(target: str, tls: ClientTls | None) -> str:
    """As `why_not`; what it stumbles over is no error in place of the one that it was to explain."""
    try:
        return why_not(target, tls)
    except Exception:  # noqa: BLE001 - the other end may say and show anything
        return ""


async def only_model(gateway: GrpcWorker) -> str:
    """The one model that is served. Raises `UsageError` where there are others, else `CallFailed`."""
    return only_one_of(list((await gateway.server_info()).supported_models))


def only_one_of(models: Sequence[str]) -> str:
    """The model that is served. Raises `CallFailed` where it is none, `UsageError` where it is several."""
    if not models:
        raise CallFailed(
            "no worker of the gateway has been reached yet, so no model is known: slagate pools says why"
        )
    if len(models) > 1:
        raise UsageError(f"--model is needed: the gateway serves {', '.join(models)}")
    return models[0]
