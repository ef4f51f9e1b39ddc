"""What asyncio has no call for: an empty collection, a file that has changed, a call that blocks."""

import threading

import anyio

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.runtime.waiting import FileWatch, UntilEmpty, run_in_daemon_thread


def test_all_who_wait_for_an_empty_collection_go_on_once_it_is_empty() -> None:
    items, ended = [1], []

    async def main() -> None:
        empty = UntilEmpty(items)

        async def wait(name: str) -> None:
            await empty.wait()
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "first")
            tasks.start_soon(wait, "second")
            await anyio.sleep(1)
            items.clear()
            empty.set()
            # Filled again before anybody could look: they wait on, and a third one with them.
            items.append(2)
            tasks.start_soon(wait, "third")
            await anyio.sleep(1)
            assert ended == []
            items.clear()
            empty.set()
            await anyio.sleep(1)
        assert sorted(ended) == ["first", "second", "third"]
        await empty.wait()

    run(main)


def test_a_file_has_changed_once_its_stamp_stays_for_a_poll_or_when_asked() -> None:
    # In use is 1: written in two goes, away and back, then asked for.
    stamps = iter([1, 2, 3, 3, 2, 3, 3, 3])
    taken: list[int] = []

    def stamp() -> object:
        taken.append(next(stamps))
        return taken[-1]

    async def main() -> None:
        watch = FileWatch(stamp, in_use=1)
        await watch.changed(0.0)
        assert taken == [1, 2, 3, 3]
        watch.ask()
        await watch.changed(60.0)
        assert taken == [1, 2, 3, 3, 2]

    anyio.run(main)


def test_a_call_that_blocks_holds_up_neither_the_loop_nor_its_end() -> None:
    blocked = threading.Event()

    async def main() -> None:
        with anyio.move_on_after(0.01):
            await run_in_daemon_thread(blocked.wait)

    anyio.run(main)
    assert not blocked.is_set()
    blocked.set()
