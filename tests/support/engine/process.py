"""`slagate worker trtllm` over the double of the package, as real processes."""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slagate.workers.sim.api import NEWEST
from support.engine.double import ENVIRONMENT
from support.engine.workers import MODEL
from support.gateway.processes import LOOPBACK, Process, starting
from support.limits import HANG_S

TESTS = Path(__file__).parents[2]

MOST_PROCESSES = 16


def environment(version: str, **settings: Any) -> dict[str, str]:
    """Of a process that has this version installed; `settings` are the double's."""
    paths = [
        str(TESTS / "support" / "engine" / "package"),
        str(TESTS),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        ENVIRONMENT: json.dumps({"api": version, **settings}),
    }


def arguments(role: str, *options: str, **engine: Any) -> list[str]:
    """A command line; `engine` are the engine's arguments, nested ones as dicts."""
    values: dict[str, Any] = {
        "max_batch_size": 256,
        "enable_chunked_prefill": True,
        **engine,
    }
    if role in ("prefill", "decode"):
        transceiver = {"backend": "DEFAULT", "max_tokens_in_buffer": 131_072}
        transceiver["kv_transfer_timeout_ms"] = int(HANG_S * 1000)
        values["cache_transceiver_config"] = transceiver | values.get(
            "cache_transceiver_config", {}
        )
    if role == "prefill":
        values.setdefault("disable_overlap_scheduler", True)
    fixed = ["worker", "trtllm", "--role", role, "--model", MODEL, "--insecure"]
    listen = ["--listen", f"{LOOPBACK}:0", "--drain", "0"]
    return [*fixed, *listen, "--override-engine-args", json.dumps(values), *options]


@contextmanager
def trtllm_worker(
    folder: Path,
    role: str,
    *options: str,
    version: str = NEWEST,
    settings: Mapping[str, Any] | None = None,
    name: str = "worker",
    **engine: Any,
) -> Iterator[Process]:
    """A worker process from its first moment on, for the time of the block."""
    environ = environment(version, **(settings or {}))
    with starting(name, arguments(role, *options, **engine), folder, environ) as process:
        yield process


class SharedWorkers:
    """Workers that several tests ask, each started for the first one; the newest few are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._n_started = 0
        self._of: OrderedDict[str, tuple[Process, ExitStack]] = OrderedDict()

    def at(
        self,
        role: str,
        *options: str,
        version: str,
        settings: Mapping[str, Any],
        **engine: Any,
    ) -> str:
        """The address of a ready one."""
        key = json.dumps([role, options, version, settings, engine], sort_keys=True)
        if key not in self._of:
            while len(self._of) >= MOST_PROCESSES:
                self._of.popitem(last=False)[1][1].close()
            self._n_started += 1
            with ExitStack() as stack:
                worker = stack.enter_context(
                    trtllm_worker(
                        self._folder,
                        role,
                        *options,
                        version=version,
                        settings=settings,
                        name=f"{role}-{self._n_started}",
                        **engine,
                    )
                )
                worker.wait_ready()
                self._of[key] = worker, stack.pop_all()
        self._of.move_to_end(key)
        return self._of[key][0].address

    def key_file(self, key: bytes) -> str:
        """A file with this key."""
        path = self._folder / f"{key.hex()}.key"
        path.write_bytes(key)
        return str(path)

    def close(self) -> None:
        """End all of them, side by side."""
        for process, _ in self._of.values():
            process.popen.terminate()
        while self._of:
            self._of.popitem()[1][1].close()
