"""The installed `tensorrt_llm`: the names a worker needs of it, and its log level.

Nothing else in slagate needs the package, and this module can be imported without it: `load_package`
imports it when a worker starts, and tries the places that a name had in different versions.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import anyio
from pydantic import ValidationError

from slagate.workers.runtime.usage import UsageError, clash_of_bindings
from slagate.workers.runtime.waiting import run_in_daemon_thread

log = logging.getLogger(__name__)

_T = TypeVar("_T")

HOW_TO_INSTALL = (
    "pip install 'slagate[trtllm]' --extra-index-url https://pypi.nvidia.com, on a machine with an NVIDIA "
    "GPU, or start from NVIDIA's image nvcr.io/nvidia/tensorrt-llm/release; slagate worker sim "
    "needs neither"
)

_NEEDED = {
    "LLM": ("tensorrt_llm",),
    "SamplingParams": ("tensorrt_llm.llmapi.llm", "tensorrt_llm.sampling_params"),
    "DisaggregatedParams": ("tensorrt_llm.llmapi", "tensorrt_llm.disaggregated_params"),
    "SchedulingParams": ("tensorrt_llm.scheduling_params",),
    "RequestError": ("tensorrt_llm.executor.utils",),
}
_OPTIONAL = {
    "MultimodalEncoder": ("tensorrt_llm",),
    "MetricsCollector": ("tensorrt_llm.metrics",),
    "GuidedDecodingParams": ("tensorrt_llm.sampling_params",),
    "LogitsProcessor": ("tensorrt_llm.sampling_params",),
    "Logprob": ("tensorrt_llm.executor.result",),
    "KVCacheEventSerializer": ("tensorrt_llm._utils",),
    "get_global_disagg_request_id": ("tensorrt_llm.llmapi.disagg_utils",),
    "DecodingBaseConfig": ("tensorrt_llm.llmapi.llm_args",),
    "EngineDeadError": ("tensorrt_llm.executor.utils",),
    "TorchLlmArgs": ("tensorrt_llm.llmapi.llm_args",),
}

LOG_LEVEL = "TLLM_LOG_LEVEL"

TELEMETRY, NO_TELEMETRY = "telemetry_config", "TRTLLM_NO_USAGE_STATS"
"""The engine's argument for its reports to NVIDIA, and the variable against them, which is older."""

_LOG_LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"}


@dataclass(slots=True)
class EnginePackage:
    """The names of one version; None for what it lacks."""

    version: str
    LLM: Any
    SamplingParams: Any
    DisaggregatedParams: Any
    SchedulingParams: Any
    RequestError: Any
    MultimodalEncoder: Any | None = None
    MetricsCollector: Any | None = None
    GuidedDecodingParams: Any | None = None
    LogitsProcessor: Any | None = None
    Logprob: Any | None = None
    KVCacheEventSerializer: Any | None = None
    get_global_disagg_request_id: Any | None = None
    DecodingBaseConfig: Any | None = None
    EngineDeadError: Any | None = None
    TorchLlmArgs: Any | None = None


def check_installed() -> None:
    """Raises a `UsageError` that says what to install if `tensorrt_llm` is missing.

    The package is looked for and not imported, which takes half a minute.
    """
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise UsageError(
            f"slagate worker trtllm needs tensorrt_llm, which is not installed: {HOW_TO_INSTALL}"
        )


def installed_version() -> str | None:
    """The version of the installed distribution, if there is one. Does not import it."""
    try:
        return importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        return None


def load_package() -> EnginePackage:
    """Import the package. Raises `UsageError` where that fails, or where a needed name is missing."""
    check_installed()
    try:
        root = importlib.import_module("tensorrt_llm")
        names = {name: _first(name, places) for name, places in (_NEEDED | _OPTIONAL).items()}
    except (ImportError, OSError) as error:  # a missing library of CUDA or MPI
        raise UsageError(f"tensorrt_llm is installed, and cannot be imported: {error}") from error
    except TypeError as error:
        if clash := clash_of_bindings(error):
            raise UsageError(clash) from error
        raise
    version = str(getattr(root, "__version__", "unknown"))
    missing = [name for name in _NEEDED if names[name] is None]
    if missing:
        raise UsageError(
            f"tensorrt_llm {version} has no {', '.join(missing)}; 1.1 or newer is needed: {HOW_TO_INSTALL}"
        )
    return EnginePackage(version, **names)


def judge_arguments(package: EnginePackage, values: Mapping[str, Any]) -> None:
    """Have the engine's own model judge its arguments. Raises `UsageError` with what it says.

    What is not about single arguments, such as a file that is missing, is left to the constructor.
    """
    if package.TorchLlmArgs is None or values.get("backend") == "_autodeploy":
        return
    try:
        package.TorchLlmArgs(**values)
    except ValidationError as error:
        raise UsageError(f"tensorrt_llm {package.version} says: {error}") from error
    except Exception:
        log.debug("engine.arguments_not_judged", exc_info=True)


def _first(name: str, places: tuple[str, ...]) -> Any | None:
    """What the name stands for in the first of these modules that has it."""
    for place in places:
        try:
            module = importlib.import_module(place)
        except ImportError:
            continue
        if hasattr(module, name):
            return getattr(module, name)
    return None


def set_engine_log_level(level: str, environ: MutableMapping[str, str]) -> None:
    """Give the engine the worker's log level, unless the environment sets one.

    Must be called before the package is imported, which reads the variable once.
    """
    environ.setdefault(LOG_LEVEL, _LOG_LEVELS.get(level.lower(), "INFO"))


def with_telemetry_choice(
    values: Mapping[str, Any], package: EnginePackage, environ: MutableMapping[str, str]
) -> dict[str, Any]:
    """The engine's arguments, with its reports to NVIDIA off unless the arguments ask for them.

    An engine without an argument for that does not get it. Where there are reports all the same, they are
    off by a variable, which is set here unless it is set already.
    """
    wanted = values.get(TELEMETRY)
    if TELEMETRY in getattr(package.TorchLlmArgs, "model_fields", {}) and wanted is not None:
        return dict(values)
    if wanted is None or wanted.get("disabled"):
        environ.setdefault(NO_TELEMETRY, "1")
    return {name: value for name, value in values.items() if name != TELEMETRY}


def handoff_ids(package: EnginePackage, instance_id: str) -> Callable[[], int] | None:
    """A function that makes ids for handoffs, which should differ from those of other prefill workers.

    None for a version that has no such ids. An id contains the place of its maker, which is taken from the
    worker's instance id: up to 1.3.0rc21 of 10 bits, since then of 8 for a node and 6 for a process.
    Workers whose places are equal may make equal ids.
    """
    make = package.get_global_disagg_request_id
    if make is None:
        return None
    digest = blake2b(instance_id.encode(), digest_size=4).digest()
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(make).parameters
    if "node_id" in parameters:
        place: tuple[int, ...] = (digest[0], digest[1] % 64)
    else:
        place = (int.from_bytes(digest, "big") % 1021,)

    def new_id() -> int:
        return int(make(*place))

    return new_id


def as_usage(construct: Callable[[], _T]) -> Callable[[], _T]:
    """`construct`, but errors by which engines refuse arguments are raised as a `UsageError`.

    They are `ValueError`, `FileNotFoundError` for a file that an argument names, and `NotImplementedError`
    for arguments that do not go together.
    """

    def constructed() -> _T:
        try:
            return construct()
        except (ValueError, FileNotFoundError, NotImplementedError) as error:
            # The log has where in the engine it was raised.
            log.exception("engine.refused")
            raise UsageError(f"engine arguments: {error}") from error

    return constructed


def constructor_values(package: EnginePackage, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments as this version's constructor takes them. Raises `ValueError` for a wrong section.

    Before pull request #11158 it takes no dict for `speculative_config`; what made one of a YAML file then,
    `from_dict`, is gone since.
    """
    section = values.get("speculative_config")
    from_dict = getattr(package.DecodingBaseConfig, "from_dict", None)
    if from_dict is None or not isinstance(section, Mapping):
        return values
    # A copy, as the type is taken out of what it is given.
    return {**values, "speculative_config": from_dict(dict(section))}


async def shut_down(llm: Any, *, limit_s: float) -> str:
    """Shut an engine down. Why it may not have ended (it took over `limit_s`, or raised), or ""."""
    try:
        with anyio.fail_after(limit_s):
            await run_in_daemon_thread(llm.shutdown)
    except TimeoutError:
        log.error("engine.shutdown_timeout", extra={"limit_s": limit_s})
        return f"the engine did not end in {limit_s:g} s"
    except Exception as error:
        log.exception("engine.shutdown_failed")
        return f"{type(error).__name__}: {error}"
    return ""
