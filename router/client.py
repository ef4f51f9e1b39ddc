"""Calls of the commands to a gateway or a worker, and what is said to people where one fails.

A failed call is one `CallFailed`; its message names the options that may be wrong, if the error tells.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto.rpc.status import Status
from slagate.workers.client.client import WorkerClient, connect_worker
from slagate.workers.client.control import channel_to
from slagate.workers.errors import WorkerError
from slagate.workers.runtime.usage import UsageError
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ClientTls

CLIENT_LISTENER = "a gateway's or a worker's listener for clients (--listen)"
_ADMIN_LISTENER = "the gateway's admin listener (`slagate serve --admin`)"

_HINTS = (
    ("not yet valid", "the certificate of {target} is not valid yet (or the clock here is wrong)"),
    ("has expired", "the certificate of {target}, or a CA of it, has expired"),
    (
        "issuer|self.signed",
        "the certificate of {target} is of no CA in {ca}: give the CA that issued it with --tls-ca",
    ),
    (
        "Hostname (mismatch|Verification)|IP address mismatch",
        "the certificate of {target} is not for {name}: give a name of it with --tls-name",
    ),
    ("ALPN", "{target} does not speak gRPC, which is HTTP/2 (ALPN h2); it should be {where}"),
    (
        "WRONG_VERSION|not speak TLS",
        "{target} does not speak TLS: if it speaks plaintext, give --insecure in place of {given};"
        " it should be {where}",
    ),
    ("SETTINGS", "{target} does not speak gRPC; it should be {where}"),
    ("refused|call failed", "cannot connect to {target}: Connection refused; it should be {where}"),
    (
        "closed|reset|Unwrap|ALERT|alert",
        "{target} closed the connection: {whose_tls}; otherwise it may have as many as it takes",
    ),
)
"""What our gRPC or grpcio says of a connection that failed, and what to do then; the first fit counts."""


_ERRNO = re.compile(r"\[Errno -?\d+\] ")


class CallFailed(Exception):
    """A server could not be called, or refused the call; the message is for people."""


def explain_failure(status: Status, target: str, tls: TlsFiles | None, where: str) -> str:
    """Why a call of `target` failed, in words; if no connection was made, with what to do about it.

    `tls` is what the options name (None: plaintext), `where` says which listener `target` should be.
    """
    words = status.message
    _, is_ours, cause = words.partition(f"cannot connect to {target}: ")
    if not is_ours and not words.startswith(("failed to connect to all addr", "errors resolving ")):
        return words
    cause = cause or words.replace(target, "").removesuffix("]")
    files = tls or TlsFiles()
    given = [each.option for each in (files.ca, files.cert, files.key) if each is not None]
    whose_tls = "if it asks for a client certificate, give --tls-cert and --tls-key"
    if tls is None:
        whose_tls = (
            "if it speaks TLS, give --tls-ca (and --tls-cert and --tls-key, where it asks for a"
            " certificate) in place of --insecure"
        )
    elif tls.cert is not None:
        whose_tls = f"if it does not take {tls.cert}, give one of a CA in its --tls-client-ca"
    for pattern, hint in _HINTS:
        if re.search(pattern, cause):
            return hint.format(
                target=target,
                where=where,
                ca=files.ca,
                name=files.server_name or target.rpartition(":")[0],
                given=" and ".join(given + ["--tls-name"] * bool(files.server_name)),
                whose_tls=whose_tls,
            )
    if not is_ours:
        cause = cause.rpartition(": ")[2]
    return f"cannot connect to {target}: {_ERRNO.sub('', cause)}; it should be {where}"


@asynccontextmanager
async def admin_at(target: str, tls: TlsFiles | None) -> AsyncIterator[Any]:
    """A stub of a gateway's admin service (no `tls`: plaintext). Failed calls raise `CallFailed`."""
    async with (
        channel_to(target, _client_tls(tls)) as channel,
        _explaining(target, tls, _ADMIN_LISTENER),
    ):
        yield gw_grpc.GatewayStub(channel)


@asynccontextmanager
async def engine_at(target: str, tls: TlsFiles | None) -> AsyncIterator[WorkerClient]:
    """A client of a gateway or of a worker; else as `admin_at`."""
    async with (
        connect_worker(target, tls=_client_tls(tls)) as engine,
        _explaining(target, tls, CLIENT_LISTENER),
    ):
        yield engine


def _client_tls(tls: TlsFiles | None) -> ClientTls | None:
    return None if tls is None else ClientTls("command", tls)


@asynccontextmanager
async def _explaining(target: str, tls: TlsFiles | None, where: str) -> AsyncIterator[None]:
    """Turn errors of calls within the `with` into `CallFailed`; `where` is what `target` should be."""
    try:
        yield
        return
    except grpc.aio.AioRpcError as error:
        status = Status(error.code(), error.details() or "")
    except WorkerError as error:
        status = error.status
        # A command may have two of them, with the same options, and be in the `with` of both.
        target = error.address or target
    words = status.message
    if status.code is grpc.StatusCode.UNAVAILABLE:
        words = explain_failure(status, target, tls, where)
    elif status.code is grpc.StatusCode.UNIMPLEMENTED:
        words = f"{words} Is {target} {where}?"
    raise CallFailed(f"{status.code.name}: {words}")


async def only_model(gateway: WorkerClient) -> str:
    """The only model that is served. Raises `UsageError` if there are others, `CallFailed` if none is."""
    return only_one_of(list((await gateway.server_info()).supported_models))


def only_one_of(models: Sequence[str]) -> str:
    """The one of `models`. Raises `UsageError` if there are several, `CallFailed` if there is none."""
    if not models:
        raise CallFailed(
            "no worker of the gateway has been reached yet, so no model is known: slagate pools says why"
        )
    if len(models) > 1:
        raise UsageError(f"--model is needed: the gateway serves {', '.join(models)}")
    return models[0]
