"""Dynamo's own pool selection, out of the wheel that `make dev` installs without its dependencies."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

VERSION = "1.6.1"
STAGES = {"disagg": ("prefill", "decode"), "agg": ("agg",)}
_FIELDS = {
    "isl": "isl",
    "context_length": "context_length",
    "ttft_ms": "ttft_target_ms",
    "itl_ms": "itl_target_ms",
}


@cache
def pool_selection() -> ModuleType:
    """The module, by its path: importing its package would ask for the runtime.

    Raises `PackageNotFoundError` when the wheel is not installed: a comparison with nothing proves nothing.
    """
    wheel = distribution("ai-dynamo")
    assert wheel.version == VERSION
    path = Path(str(wheel.locate_file("dynamo/global_router/pool_selection.py")))
    spec = importlib.util.spec_from_file_location("dynamo_pool_selection", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Answer(NamedTuple):
    """The pool of a request, and the pools its router would try, in order."""

    pool: int
    order: tuple[int, ...]


class Router:
    """A configuration as Dynamo's global router has it in use. Raises as Dynamo does."""

    def __init__(self, path: Path) -> None:
        self.config: Any = pool_selection().load_config(path)
        for stage in self.stages:
            # What the router's start does with names: a client for each.
            clients = {name: at for at, name in enumerate(self._of(stage, "dynamo_namespaces"))}
            for name in clients:
                f"{name}.router.generate".encode()

    @property
    def stages(self) -> tuple[str, ...]:
        return STAGES[self.config.mode]

    def select(self, stage: str, values: Mapping[str, Any], priority: Any = None) -> Answer:
        strategy = self._of(stage, "selection_strategy")
        axes = {"prefill": ("isl", "ttft_ms"), "decode": ("context_length", "itl_ms")}
        wanted = axes.get(stage, ("isl", "ttft_ms", "itl_ms"))
        given = {_FIELDS[field]: values.get(field) for field in wanted}
        pool = strategy.select_pool(**given, priority=priority)
        names = self._of(stage, "dynamo_namespaces")
        order = pool_selection().get_priority_retry_order(
            pool, self._of(stage, "priorities"), self.config.enable_priority_retry
        )
        for at in order:
            names[at]
        return Answer(pool, tuple(order))

    def _of(self, stage: str, key: str) -> Any:
        return getattr(self.config, f"{stage}_pool_{key}")


def write(path: Path, content: object) -> Path:
    """The content as Python writes it, NaN included."""
    # A file system that flushes what was truncated takes a millisecond to write over a file.
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
