import asyncio

import anyio
import pytest

from slagate.router.request.errors import Aborted, Draining
from slagate.router.request.running import CancelHandle, RunningRequests
from slagate.workers.runtime.virtual_loop import run
from support.gateway.running import listed

ABORTED = Aborted("aborted by the client")
DRAINING = Draining("shutting down")


def test_an_abort_reaches_every_request_with_that_id_of_that_peer_and_no_other() -> None:
    async def main() -> None:
        live = RunningRequests()
        ended: list[str] = []

        async def serve(peer: str, request_id: str, name: str) -> None:
            with pytest.raises(Aborted) as caught, listed(live, peer, request_id):
                await anyio.sleep_forever()
            assert caught.value is ABORTED
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            for peer, request_id, name in (
                ("p1", "same", "first"),
                ("p1", "same", "second"),
                ("p2", "same", "other peer"),
                ("p1", "else", "other id"),
            ):
                tasks.start_soon(serve, peer, request_id, name)
            await anyio.wait_all_tasks_blocked()
            assert len(live) == 4
            assert not live.abort("p3", "same", ABORTED)
            assert not live.abort("p2", "else", ABORTED)
            assert live.abort("p1", "same", ABORTED)
            await anyio.wait_all_tasks_blocked()
            assert sorted(ended) == ["first", "second"]
            assert len(live) == 2
            assert not live.abort("p1", "same", ABORTED)
            tasks.cancel_scope.cancel()
        assert len(live) == 0

    run(main)


def test_a_request_that_fails_is_no_longer_listed() -> None:
    async def main() -> None:
        live = RunningRequests()
        with pytest.raises(ValueError, match="boom"), listed(live, "p", "r"):
            raise ValueError("boom")
        assert len(live) == 0
        assert not live.abort("p", "r", ABORTED)

    run(main)


def test_a_drain_ends_every_request_by_its_error_and_the_first_error_counts() -> None:
    async def main() -> None:
        live = RunningRequests()
        ended: dict[str, Exception] = {}

        async def serve(peer: str) -> None:
            try:
                with listed(live, peer, "r"):
                    await anyio.sleep_forever()
            except (Aborted, Draining) as error:
                ended[peer] = error

        async with anyio.create_task_group() as tasks:
            for peer in ("p1", "p2", "p3"):
                tasks.start_soon(serve, peer)
            await anyio.wait_all_tasks_blocked()
            live.abort("p2", "r", ABORTED)
            live.end_all(DRAINING)
            await live.none_left()
            assert len(live) == 0
        assert ended == {"p1": DRAINING, "p2": ABORTED, "p3": DRAINING}

    run(main)


def test_none_left_waits_for_the_last_one() -> None:
    async def main() -> None:
        live = RunningRequests()
        await live.none_left()

        async def serve(seconds: float) -> None:
            with listed(live, "p", "r"):
                await anyio.sleep(seconds)

        async with anyio.create_task_group() as tasks:
            for seconds in (1.0, 3.0, 2.0):
                tasks.start_soon(serve, seconds)
            await anyio.wait_all_tasks_blocked()
            await live.none_left()
            assert anyio.current_time() == 3.0

    run(main)


def test_everybody_who_waits_for_the_last_request_is_told() -> None:
    async def main() -> None:
        live = RunningRequests()

        async def serve(seconds: float) -> None:
            with listed(live, "a", "r1"):
                await anyio.sleep(seconds)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve, 1.0)
                await anyio.sleep(0.1)
                for _ in range(2):
                    tasks.start_soon(live.none_left)

    run(main)


def test_a_request_that_is_answered_is_not_ended_any_more() -> None:
    async def main() -> None:
        live = RunningRequests()
        one = CancelHandle()
        one.start()
        live.register("p", "r", one)
        one.answered()
        assert live.abort("p", "r", ABORTED)
        await anyio.sleep(1.0)
        assert one.ended_by is None
        live.unregister("p", "r", one)

    run(main)


def test_a_request_that_was_ended_before_it_began_is_cancelled_at_once() -> None:
    async def main() -> None:
        one = CancelHandle()
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            one.start()

    run(main)


def test_a_cancellation_from_outside_is_not_taken_for_an_abort() -> None:
    async def main() -> None:
        live = RunningRequests()
        with anyio.move_on_after(1.0) as outer, listed(live, "p", "r"):
            await anyio.sleep_forever()
        assert outer.cancelled_caught
        assert len(live) == 0

    run(main)
