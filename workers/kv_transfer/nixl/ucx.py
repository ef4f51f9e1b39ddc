"""Loads NIXL, prepares the environment that UCX below it reads, and makes agents that rest when idle."""

import logging
import os
import threading
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from slagate.workers.kv_transfer.transport import KvUnavailable

log = logging.getLogger(__name__)

PROGRESS_DELAY_US = 10_000
"""How long an agent's progress thread rests. With NIXL's default, 0, every idle agent uses a whole core."""

# Over any of these, connections notice a dead peer. Over shared memory alone they do not, so UCX refuses
# NIXL's error handling mode then, and there is no backend.
_NETWORKS = ("tcp", "ib", "rc", "dc", "ud", "srd", "gga", "all")
_SAME_HOST = ("cma", "xpmem", "knem", "sm", "shm", "mm", "all")
_GPU = ("cuda", "cuda_copy", "all")

_agent_lock = threading.Lock()


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether an NVIDIA driver is loaded on this machine."""
    return (devices / "nvidiactl").exists()


def ucx_warnings(environ: Mapping[str, str], *, gpu: bool) -> list[str]:
    """Sentences about what the operator's UCX_TLS breaks or slows down."""
    wanted = environ.get("UCX_TLS", "all")
    warnings = []
    if not _has_any(wanted, _NETWORKS):
        warnings.append(f"UCX_TLS={wanted} has no tcp: NIXL cannot connect to other workers")
    if not _has_any(wanted, _SAME_HOST):
        warnings.append(f"UCX_TLS={wanted} has no cma: transfers on one host go through sockets")
    if gpu and not reaches_gpu(wanted):
        warnings.append(f"UCX_TLS={wanted} has no cuda_copy: GPU memory cannot be registered")
    return warnings


def reaches_gpu(ucx_tls: str) -> bool:
    """Whether this value of UCX_TLS leaves a transport that registers GPU memory."""
    return _has_any(ucx_tls, _GPU)


def _has_any(ucx_tls: str, names: tuple[str, ...]) -> bool:
    listed = [name.split(":")[0].strip() for name in ucx_tls.lstrip("^").split(",")]
    if ucx_tls.startswith("^"):
        # "sm" excludes all names that it stands for. A family counts as missing when no member is left.
        return names[0] not in listed and not (names is _SAME_HOST and "sm" in listed)
    return any(name == one or name.startswith(f"{one}_") for name in listed for one in names)


def set_defaults(environ: MutableMapping[str, str], *, loopback: bool, gpu: bool) -> None:
    """Set the variables of UCX and NIXL, which read them once, that the operator did not set."""
    environ.setdefault("UCX_TLS", "tcp,cma,cuda_copy" if gpu else "tcp,cma")
    environ.setdefault("UCX_LOG_LEVEL", "error")
    # The default is stdout, which is for the ready line.
    environ.setdefault("UCX_LOG_FILE", "stderr")
    environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if loopback:
        environ.setdefault("UCX_NET_DEVICES", "lo")


class Nixl(NamedTuple):
    """The library: its Python module, the bindings below it, and every class that its calls raise."""

    api: Any
    bindings: Any
    errors: tuple[type[Exception], ...]


def load_nixl(*, loopback: bool) -> Nixl:
    """Import NIXL, with its environment prepared. Raises `KvUnavailable` if it is not installed."""
    gpu = has_gpu()
    for warning in ucx_warnings(os.environ, gpu=gpu):
        log.warning("kv_transfer.environment %s", warning)
    set_defaults(os.environ, loopback=loopback, gpu=gpu)
    raise_exceptions = logging.raiseExceptions
    try:
        api: Any = import_module("nixl_cu13._api")
    except (ImportError, OSError) as error:
        raise KvUnavailable(f"nixl_cu13 cannot be imported: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions
    # NIXL's own handler writes to stdout, which is for the ready line.
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    own = [each for each in vars(api.nixlBind).values() if isinstance(each, type)]
    own_errors = (each for each in own if issubclass(each, Exception))
    # NIXL's own errors have no common base; for wrong arguments the bindings raise Python's.
    return Nixl(api, api.nixlBind, (*own_errors, RuntimeError, ValueError, TypeError, LookupError))


def error_text(error: Exception) -> str:
    """Class and message of one of NIXL's errors, for a log line or another error."""
    return f"{type(error).__name__}: {error}"


class _Bindings:
    """NIXL's bindings, but an agent's progress thread rests between polls."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.n_quiet = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        """Make the agent with a delay, which NIXL's Python interface fixes at 0."""
        config.pthrDelay = PROGRESS_DELAY_US
        self.n_quiet += 1
        return self._real.nixlAgent(name, config)


class MadeAgent(NamedTuple):
    """An agent, and whether it makes progress by itself; if not, it must be called often."""

    agent: Any
    progresses: bool


def make_agent(nixl: Nixl, name: str) -> MadeAgent:
    """A new agent with the UCX backend. Raises `KvUnavailable` without it, and `nixl.errors`."""
    api, real = nixl.api, nixl.bindings
    quiet = _Bindings(real)
    with _agent_lock:
        api.nixlBind = quiet
        try:
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        finally:
            api.nixlBind = real
        progresses = quiet.n_quiet > 0
        if not progresses:
            # Another version makes agents in another way. No progress thread is better than one that spins.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            agent = api.nixl_agent(name, config)
    if "UCX" not in agent.backends:
        raise KvUnavailable("NIXL has no UCX backend")
    return MadeAgent(agent, progresses)
