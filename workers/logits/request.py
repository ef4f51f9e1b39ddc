"""The logits processors of one request: those of every request, and those that it asks for."""

from typing import Any

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import RequestRefused, invalid, unsupported
from slagate.workers.logits.engine import OnStream, adapted, external_stream
from slagate.workers.logits.processors import LogitsError, LogitsProcessors, RequestedProcessor

KEY = "logits_processors"
FIELD = f"extra.{KEY}"

MAX_PROCESSORS = 8
"""Of one request. Each is called for every token, between two steps of the engine."""

_EXACT = 2**53
"""Integers that a Struct's doubles hold exactly."""


class RequestLogits:
    """Makes the values of `SamplingParams.logits_processor` for the requests of a worker."""

    def __init__(
        self,
        processors: LogitsProcessors,
        *,
        base: type | None,
        end_id: int,
        vocab_size: int | None,
        on_stream: OnStream = external_stream,
    ) -> None:
        """`base` is the engine's `LogitsProcessor`, or None for a version that has none."""
        self._processors = processors
        self._base = base
        self._end_id = end_id
        self._vocab_size = vocab_size
        self._on_stream = on_stream

    def processors_of(self, request: oe.GenerateRequest, *, n_outputs: int) -> list[Any] | None:
        """New processors for a request, for the engine, or None. Raises `RequestRefused`."""
        asked = _asked(request)
        if asked and self._base is None:
            raise unsupported(FIELD, "this engine takes none")
        try:
            made = self._processors.of_request(
                asked,
                end_id=self._end_id,
                n_prompt_tokens=len(request.token_ids.ids),
                vocab_size=self._vocab_size,
            )
        except LogitsError as error:
            if not error.field.startswith("["):
                reason = f"logits processor of this worker: {error}"
                raise RequestRefused(grpc.StatusCode.INTERNAL, reason) from error
            raise invalid(FIELD + error.field, error.reason) from error
        if not made:
            return None
        if n_outputs > 1:
            # The engine would call one instance for all sequences in turn.
            raise unsupported("sampling.num_sequences", "logits processors are for one sequence")
        assert self._base is not None, "checked when the worker started"
        return [adapted(self._base, name, one, self._on_stream) for name, one in made]


def _asked(request: oe.GenerateRequest) -> list[RequestedProcessor]:
    if KEY not in request.extra.fields:
        return []
    value = request.extra.fields[KEY]
    if value.WhichOneof("kind") != "list_value":
        raise invalid(FIELD, "must be a list")
    if len(value.list_value.values) > MAX_PROCESSORS:
        raise invalid(FIELD, f"more than {MAX_PROCESSORS} are given")
    return [_wanted(index, _plain(one)) for index, one in enumerate(value.list_value.values)]


def _wanted(index: int, entry: Any) -> RequestedProcessor:
    field = f"{FIELD}[{index}]"
    if not isinstance(entry, dict):
        raise invalid(field, "must be an object with name and params")
    for key in entry:
        if key not in ("name", "params"):
            raise invalid(f"{field}.{key[:80]}", "is not known; there are name and params")
    name, params = entry.get("name"), entry.get("params", {})
    if not isinstance(name, str) or not name:
        raise invalid(f"{field}.name", "must be a name")
    if not isinstance(params, dict):
        raise invalid(f"{field}.params", "must be an object")
    return RequestedProcessor(name, params)


def _plain(value: Any) -> Any:
    """A Struct's value as JSON; whole numbers become ints, as a Struct does not tell them from floats."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {key: _plain(one) for key, one in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(one) for one in value.list_value.values]
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() and abs(number) <= _EXACT else number
    return None if kind in (None, "null_value") else getattr(value, kind)
