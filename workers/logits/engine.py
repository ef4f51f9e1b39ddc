"""Adapts logits processors to the interface of TensorRT-LLM.

The engine calls `(request id, logits, token ids of each beam, CUDA stream, client id)` in the processes of
its ranks, where an exception would end it with all its requests. An adapter is pickled on its way there.
Its class derives from one of the engine's package, which is not installed everywhere, so the class is made
with the first adapter, at both ends.
"""

import copy
import importlib
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from slagate.workers.logits.processors import LogitsProcessor
from slagate.workers.runtime.clock import monotonic_s

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""A broken processor may fail at each token of each of its requests."""

OnStream = Callable[[Any], AbstractContextManager[object]]
"""A context in which the CUDA stream at this address, if any, is the current one."""


def adapted(base: type, name: str, processor: LogitsProcessor, on_stream: OnStream) -> Any:
    """A processor as an instance of `base`, the engine's `LogitsProcessor`."""
    return _adapter_class(base)(name, processor, on_stream)


def external_stream(address: int | None) -> AbstractContextManager[object]:
    """A context in which the CUDA stream at this address, if any, is the current one."""
    if address is None:
        return nullcontext()
    cuda = importlib.import_module("torch").cuda
    stream: AbstractContextManager[object] = cuda.stream(cuda.ExternalStream(address))
    return stream


@cache
def _adapter_class(base: type) -> type:
    class Adapter(base):  # type: ignore[misc]
        """Calls a processor, and keeps its exceptions from the engine."""

        def __init__(self, name: str, processor: LogitsProcessor, on_stream: OnStream) -> None:
            super().__init__()
            self._name = name
            self._processor = processor
            self._on_stream = on_stream

        def __reduce__(self) -> Any:
            return adapted, (base, self._name, self._processor, self._on_stream)

        # The engine inspects how many parameters there are.
        def __call__(
            self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any
        ) -> None:
            """Let the processor change the logits; where it fails, they stay unchanged."""
            del req_id, client_id
            try:
                with self._on_stream(stream_ptr):
                    _apply(self._processor, logits, token_ids)
            except Exception:  # noqa: BLE001 - `Failures` logs it, with a limit
                _failures(self._name).count_failure(monotonic_s())

    return Adapter


def _apply(processor: LogitsProcessor, logits: Any, token_ids: Any) -> None:
    """Raises what the processor raises, with the logits unchanged, and `ValueError` for other shapes."""
    shape = tuple(logits.shape)
    if len(shape) != 3 or shape[:2] != (1, 1) or len(token_ids) != 1:
        raise ValueError(f"not one sequence without beams: logits {shape}, {len(token_ids)} beams")
    row = logits[0, 0, :]
    # A copy of a tensor by `copy.copy` would share its memory.
    before = row.clone() if hasattr(row, "clone") else copy.copy(row)
    try:
        processor(token_ids[0], row)
    except BaseException:
        row[:] = before
        raise


class Failures:
    """Counts the failures of one processor, and logs one at most every `LOG_EVERY_S`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._n_failures = self._n_logged = 0
        self._logged_at_s = -math.inf

    def count_failure(self, now_s: float) -> None:
        """Count a failure, and perhaps log its exception, which must be the one being handled."""
        self._n_failures += 1
        if now_s < self._logged_at_s + LOG_EVERY_S:
            return
        log.exception(
            "logits_processor.failed",
            extra={
                "processor": self._name,
                "failures": self._n_failures - self._n_logged,
                "failures_so_far": self._n_failures,
            },
        )
        self._n_logged, self._logged_at_s = self._n_failures, now_s


@cache
def _failures(name: str) -> Failures:
    """The failures of a processor in this process; an adapter is made for only one request."""
    return Failures(name)
