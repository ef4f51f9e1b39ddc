"""Holds a worker's stream while too much of what it has said waits for the client."""

import asyncio
from collections.abc import Callable

from slagate.proto.rpc.sinks import Call, ResponseWriter, made_progress


class Backpressure:
    """Pauses a worker's stream on demand, and resumes it when nothing waits for the client any more.

    If the client reads nothing for `limit_s` while the stream is paused, `stuck` is called, once.
    """

    def __init__(
        self, client: ResponseWriter, call: Call, *, limit_s: float, stuck: Callable[[], None]
    ) -> None:
        self._client = client
        self._call: Call | None = call  # None: the stream is over
        self._limit_s = limit_s
        self._stuck = stuck
        self._left: tuple[int, ...] | None = None  # unsent bytes at the last check
        self._timer: asyncio.TimerHandle | None = None  # while the worker waits

    def pause_worker(self) -> bool:
        """Pause the worker's stream. False: it is paused already, or over."""
        if self._call is None or self._timer is not None:
            return False
        self._call.pause()
        self._client.on_room(self._resume_worker)
        self._watch()
        return True

    def stop(self) -> None:
        """Stop watching: the worker's stream is over. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._call = None

    def _resume_worker(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._call is not None:
                self._call.resume()

    def _watch(self) -> None:
        # Not counted yet: what is being passed on right now belongs to it.
        self._left = None
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)

    def _check(self) -> None:
        left = self._client.unsent()
        if self._left is None or made_progress(self._left, left):
            self._left = left
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)
        else:
            self.stop()
            self._stuck()
