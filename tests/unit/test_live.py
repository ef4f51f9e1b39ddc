import anyio
import pytest

from slagate.router.live import LiveRequests
from support.virtual_loop import run


def test_an_abort_reaches_every_request_with_that_id_of_that_peer_and_no_other() -> None:
    async def main() -> None:
        live = LiveRequests()
        ended: list[str] = []

        async def serve(peer: str, request_id: str, name: str) -> None:
            with anyio.CancelScope() as scope, live.listed(peer, request_id, scope):
                await anyio.sleep_forever()
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
            assert not live.abort("p3", "same")
            assert not live.abort("p2", "else")
            assert live.abort("p1", "same")
            await anyio.wait_all_tasks_blocked()
            assert sorted(ended) == ["first", "second"]
            assert len(live) == 2
            assert not live.abort("p1", "same")
            tasks.cancel_scope.cancel()
        assert len(live) == 0

    run(main)


def test_a_request_that_fails_is_no_longer_listed() -> None:
    async def main() -> None:
        live = LiveRequests()
        scope = anyio.CancelScope()
        with pytest.raises(ValueError, match="boom"), live.listed("p", "r", scope):
            raise ValueError("boom")
        assert len(live) == 0
        assert not live.abort("p", "r")

    run(main)
