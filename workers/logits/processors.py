"""Logits processors: their interface, those that a worker offers, and those of one request.

A processor changes the logits from which a request's next token is drawn. Packages offer factories under
the entry-point group `slagate.logits_processors`. A factory is called once for each request, with the
parameters that an operator or a client gave, so a processor may keep state. A factory may also take what
only the worker knows: `end_id`, the token that ends a text; `n_prompt_tokens`, from which a processor on a
decode worker can tell the length of the answer so far; and `vocab_size`, None where the worker does not
know it.
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Protocol

from slagate.workers.runtime.usage import UsageError

log = logging.getLogger(__name__)

GROUP = "slagate.logits_processors"

FROM_WORKER = ("end_id", "n_prompt_tokens", "vocab_size")
"""Parameters of a factory that only the worker may give."""


class LogitsProcessor(Protocol):
    """Changes the logits of one request, for which it was made."""

    def __call__(self, input_ids: Sequence[int], logits: Any, /) -> None:
        """Change the logits before a token of the answer is drawn.

        `input_ids` is the prompt and the answer so far, and must not be changed. `logits` is an array or
        tensor of shape (vocabulary,), which is changed in place; a returned value is ignored.
        """


class RequestedProcessor(NamedTuple):
    """The name of a processor and the parameters of its factory."""

    name: str
    params: Mapping[str, Any]


class LogitsError(Exception):
    """A processor cannot be made; `field` is the part of its specification that is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class LogitsProcessors:
    """The processors that every request of a worker has, and those that a request may ask for."""

    def __init__(
        self,
        every: Sequence[RequestedProcessor] = (),
        allowed: Iterable[str] = (),
        *,
        load: "Callable[[str], Any] | None" = None,
    ) -> None:
        """`load` finds a factory by name. Raises `UsageError`, with the option, for a bad one."""
        load = _load if load is None else load
        self.every = tuple(every)
        self.allowed = tuple(dict.fromkeys(allowed))
        self._factories: dict[str, Any] = {}
        for option, names in (
            ("--logits-processor", [wanted.name for wanted in every]),
            ("--allow-logits-processor", self.allowed),
        ):
            for name in names:
                try:
                    self._factories[name] = load(name)
                except LogitsError as error:
                    raise UsageError(f"{option} {name}: {error.reason}") from error
        self.check(end_id=0, vocab_size=None)

    @property
    def is_used(self) -> bool:
        """Whether any request may have a processor."""
        return bool(self._factories)

    def check(self, *, end_id: int, vocab_size: int | None) -> None:
        """Raises `UsageError` for wrong parameters of the processors that every request has.

        Called before the engine is started, and again when its vocabulary is known.
        """
        for wanted in self.every:
            try:
                self._made(wanted, end_id=end_id, n_prompt_tokens=1, vocab_size=vocab_size)
            except LogitsError as error:
                raise UsageError(f"--logits-processor {wanted.name}: {error}") from error

    def of_request(
        self,
        asked: Sequence[RequestedProcessor],
        *,
        end_id: int,
        n_prompt_tokens: int,
        vocab_size: int | None,
    ) -> list[tuple[str, LogitsProcessor]]:
        """New processors with their names: those of every request, then those of `asked`.

        Raises `LogitsError`; for one of `asked`, its field begins with the index.
        """
        given = {"end_id": end_id, "n_prompt_tokens": n_prompt_tokens, "vocab_size": vocab_size}
        made = [(wanted.name, self._made(wanted, **given)) for wanted in self.every]
        for index, wanted in enumerate(asked):
            try:
                if wanted.name not in self.allowed:
                    raise LogitsError("name", f"{wanted.name[:80]!r} is not enabled on this worker")
                made.append((wanted.name, self._made(wanted, **given)))
            except LogitsError as error:
                raise LogitsError(f"[{index}].{error.field}", error.reason) from error
        return made

    def _made(self, wanted: RequestedProcessor, **given: int | None) -> LogitsProcessor:
        factory = self._factories[wanted.name]
        try:
            processor = factory(**_arguments(factory, wanted.params, given))
        except (TypeError, ValueError) as error:
            raise LogitsError("params", str(error)) from error
        except LogitsError:
            raise
        except Exception as error:
            # An error of a package's code must not be taken for the end of the engine.
            log.exception("logits_processor.factory_failed", extra={"processor": wanted.name})
            raise LogitsError("name", f"its factory failed with {type(error).__name__}") from error
        if not callable(processor):
            raise LogitsError("name", "its factory made nothing that can be called")
        made: LogitsProcessor = processor
        return made


def requested_of(text: str) -> RequestedProcessor:
    """Parse an option `NAME` or `NAME=JSON`. Raises `UsageError`."""
    name, has_params, params_text = text.partition("=")
    if not name:
        raise UsageError(f"--logits-processor {text!r}: must be NAME or NAME=JSON")
    if not has_params:
        return RequestedProcessor(name, {})
    try:
        params = json.loads(params_text)
    except ValueError as error:
        raise UsageError(
            f"--logits-processor {name}: its parameters are no JSON: {error}"
        ) from error
    if not isinstance(params, dict):
        raise UsageError(f"--logits-processor {name}: its parameters must be a JSON object")
    return RequestedProcessor(name, params)


def _load(name: str) -> Any:
    """The factory that packages offer under this name. Raises `LogitsError`."""
    offered = entry_points(group=GROUP)
    found = {point.value: point for point in offered if point.name == name}
    if not found:
        names = ", ".join(sorted({point.name for point in offered})) or "none"
        raise LogitsError("name", f"is not installed; there are: {names}")
    if len(found) > 1:
        raise LogitsError("name", f"is offered by several packages: {', '.join(sorted(found))}")
    try:
        factory = next(iter(found.values())).load()
    except Exception as error:
        raise LogitsError("name", f"cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise LogitsError("name", "is no factory: it cannot be called")
    return factory


def _arguments(
    factory: Any, params: Mapping[str, Any], given: Mapping[str, int | None]
) -> dict[str, Any]:
    """The arguments for a factory. Raises `LogitsError` naming a parameter."""
    parameters = inspect.signature(factory).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name in params:
        if name in FROM_WORKER:
            raise LogitsError(f"params.{name}", "is given by the worker")
        if name not in parameters and not takes_any:
            raise LogitsError(f"params.{name[:80]}", "is no parameter of this processor")
    arguments = {**params, **{name: given[name] for name in FROM_WORKER if name in parameters}}
    for name, each in parameters.items():
        is_named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if is_named and each.default is each.empty and name not in arguments:
            raise LogitsError(f"params.{name}", "is missing")
    return arguments
