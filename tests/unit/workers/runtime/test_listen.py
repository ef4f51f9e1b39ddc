import json
import os
import signal
import socket
from typing import Any

import anyio
import grpc.aio
import pytest

from slagate.proto.rpc.address import Address, parse_address
from slagate.workers.runtime.listen import (
    bind,
    given_by,
    ignore_hangups,
    listen_on,
    on_sighup,
    ready_line,
    stopped,
    unless_stopped,
)
from slagate.workers.server import SERVER_OPTIONS
from support.limits import HANG_S


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("0.0.0.0:65535", Address("0.0.0.0", 65535)),
        ("localhost:8080", Address("localhost", 8080)),
        ("[::1]:50051", Address("::1", 50051)),
    ],
)
def test_an_address_is_read_and_shown_the_same(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(parse_address(text)) == text


BAD_ADDRESSES = (
    *("", ":", "8080", ":8080", "host", "host:", "host:http", "host:-1", "host:65536", "host: 1"),
    *("h:1_0", "host:\u0661", "host:+1", "host:1.0", "host:" + "9" * 5000),
)


@pytest.mark.parametrize("text", BAD_ADDRESSES)
def test_what_is_no_address_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|has no port from 0 to 65535"):
        parse_address(text)


@pytest.mark.parametrize("text", ["::1:50051", "fe80::1:80"])
def test_an_ipv6_host_needs_its_brackets(text: str) -> None:
    with pytest.raises(ValueError, match="bracket"):
        parse_address(text)


def test_the_ready_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    ready_line(listen="127.0.0.1:5", pid=7)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"event": "ready", "listen": "127.0.0.1:5", "pid": 7}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event_and_is_let_go_of_afterwards(number: signal.Signals) -> None:
    async def main() -> None:
        before = signal.getsignal(number)
        async with stopped() as event:
            # The receiver starts in a task of its own; a signal before that would end this process.
            await anyio.wait_all_tasks_blocked()
            assert signal.getsignal(number) != before
            assert not event.is_set()
            during = signal.getsignal(number)
            os.kill(os.getpid(), number)
            with anyio.fail_after(HANG_S):
                await event.wait()
        assert signal.getsignal(number) != during

    anyio.run(main)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_one_signal_the_same_one_is_the_kernels_and_the_other_is_not(
    number: signal.Signals,
) -> None:
    other = signal.SIGINT if number == signal.SIGTERM else signal.SIGTERM

    async def main() -> None:
        async with stopped() as event:
            await anyio.wait_all_tasks_blocked()
            before = signal.getsignal(other)
            os.kill(os.getpid(), number)
            with anyio.fail_after(HANG_S):
                await event.wait()
            await anyio.wait_all_tasks_blocked()
            assert signal.getsignal(number) == signal.SIG_DFL
            assert signal.getsignal(other) == before != signal.SIG_DFL

    anyio.run(main)


def test_who_has_children_is_told_of_the_second_signal_of_a_kind() -> None:
    async def main() -> None:
        again = anyio.Event()
        async with stopped(again=again.set) as event:
            await anyio.wait_all_tasks_blocked()
            os.kill(os.getpid(), signal.SIGINT)
            with anyio.fail_after(HANG_S):
                await event.wait()
            # A parent's, after Ctrl-C has reached parent and child: one of each is no second one.
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.wait_all_tasks_blocked()
            assert not again.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            with anyio.fail_after(HANG_S):
                await again.wait()

    anyio.run(main)


def test_work_is_ended_by_a_signal_or_returns() -> None:
    async def forever() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        await anyio.sleep_forever()
        raise AssertionError

    async def at_once() -> str:
        return "done"

    assert anyio.run(unless_stopped, at_once) == "done"
    assert anyio.run(unless_stopped, forever) is None


def test_an_address_that_is_taken_or_no_name_is_told_with_its_option_and_the_reason() -> None:
    async def main() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        with listen_on(Address("127.0.0.1", 0)) as listening:
            taken = Address("127.0.0.1", listening.getsockname()[1])
            told = rf"^--admin: cannot listen on {taken}: Address already in use$"
            with pytest.raises(OSError, match=told), given_by("--admin"):
                bind(server, taken)
        told = r"^--listen: cannot listen on a\.\.b:1: .*label"
        with pytest.raises(OSError, match=told), given_by("--listen"):
            listen_on(Address("a..b", 1))

    anyio.run(main)


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_a_hangup_is_acted_on_and_ignored_before_and_afterwards(*, use_uvloop: bool) -> None:
    before = signal.getsignal(signal.SIGHUP)
    n_told = 0

    async def main() -> None:
        nonlocal n_told
        told = anyio.Event()

        def tell() -> None:
            nonlocal n_told
            n_told += 1
            told.set()

        async with on_sighup(tell):
            os.kill(os.getpid(), signal.SIGHUP)
            with anyio.fail_after(HANG_S):
                await told.wait()
        os.kill(os.getpid(), signal.SIGHUP)

    try:
        ignore_hangups()
        os.kill(os.getpid(), signal.SIGHUP)
        anyio.run(main, backend_options={"use_uvloop": use_uvloop})
    finally:
        signal.signal(signal.SIGHUP, before)
    assert n_told == 1


def test_a_host_that_vanished_does_not_keep_its_connection_for_ever() -> None:
    with (
        listen_on(Address("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_hangup_never_ends_the_process_when_it_is_no_more_acted_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for a moment: whoever sends it cannot know when that is."""
    before = signal.getsignal(signal.SIGHUP)
    found: list[object] = []

    def told(number: int, handler: Any) -> Any:
        if number == signal.SIGHUP:
            found.append(handler)
        return put(number, handler)

    async def main() -> None:
        async with on_sighup(lambda: None):
            pass

    put = signal.signal
    monkeypatch.setattr(signal, "signal", told)
    try:
        anyio.run(main)
    finally:
        put(signal.SIGHUP, before)
    assert found[-1] is signal.SIG_IGN
    assert signal.SIG_DFL not in found
