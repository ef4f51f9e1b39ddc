"""A `tensorrt_llm` package with the simulated engine in it, for a real worker process.

`tests/support/package` on `PYTHONPATH` makes it importable; the environment says which version it is, and
what is wrong with it. Its `LLM` has what TensorRT-LLM's has and nothing more, so a worker that leans on a
lever of the simulation fails. Prompts that begin with one of `Fault` make the engine misbehave.
"""

import asyncio
import functools
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from enum import IntEnum
from types import ModuleType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import anyio
import prometheus_client
from pydantic import BaseModel, create_model

from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.profiles.profile import load_profile
from slagate.workers.sim.api import NEWEST, SimApi, sim_api
from slagate.workers.sim.args import (
    DECODING_TYPE,
    EARLIER_DEFAULTS,
    LACKS,
    DecodingSection11,
    EagleDecodingConfig,
    SimSettings,
    TorchLlmArgs,
)
from slagate.workers.sim.handoff import DisaggIds
from slagate.workers.sim.outputs import RequestOutput

ENVIRONMENT = "SLAGATE_TEST_ENGINE"
"""JSON: `api`, `init` ("hang", one of `INIT_ERRORS`, or seconds), `bindings` (whether the package imports
its own of OpenEngine), `reports` (telemetry without an argument for it), and fields of `SimSettings`."""

PROFILE = "llama-3.1-8b-h100"

INIT_ERRORS: dict[object, Exception] = {
    "fail": RuntimeError("CUDA out of memory"),
    "no file": FileNotFoundError(2, "No such file or directory", "balancer.yaml"),
    "not implemented": NotImplementedError("KV Cache Connector is not supported with beams"),
}

PRUNED = (
    "build_config",
    "scheduler_config",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "cp_config",
)
"""What `_autodeploy` has no argument for."""


class Fault(IntEnum):
    """First token of a prompt -> what the engine does about it."""

    DIE = 90_001  # a fatal error, of which the result tells
    QUIT = 90_002  # the engine's process quits
    HANG = 90_003  # no result, ever
    REFUSE = 90_004  # ValueError at submit
    FAIL = 90_005  # RequestError from the result
    EMPTY = 90_006  # a result without an end
    NO_HANDOFF = 90_007  # context_only that leaves nothing to fetch
    CHECK_HANGS = 90_008  # the health check does not answer any more


class DoubleLLM:
    """What TensorRT-LLM shows of an `LLM`; the simulated engine is out of reach behind it."""

    api: SimApi
    settings: Mapping[str, Any]

    def __init__(
        self,
        model: object,
        tokenizer: object = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,  # noqa: FBT001, FBT002
        trust_remote_code: bool = False,  # noqa: FBT001, FBT002
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        settings = dict(self.settings)
        _fail_init(settings.pop("init", None))
        reports = settings.pop("reports", False)
        if kwargs.pop("backend", "pytorch") == "_autodeploy":
            for name in PRUNED:
                if name in kwargs:
                    raise ValueError(f"AutoDeploy's LlmArgs has no argument {name!r}")
        transport = SharedMemoryTransport() if kwargs.get("cache_transceiver_config") else None
        sim = self.api.LLM(
            model,
            tokenizer,
            tokenizer_mode,
            skip_tokenizer_init,
            trust_remote_code,
            tensor_parallel_size,
            dtype,
            revision,
            tokenizer_revision,
            sim=SimSettings(profile=load_profile(PROFILE).tp(1), transport=transport, **settings),
            **kwargs,
        )
        _report(sim.args, reports=reports)
        self.llm_id, self.args, self.tokenizer = sim.llm_id, sim.args, sim.tokenizer
        self._hf_model_config = sim._hf_model_config
        self.get_kv_cache_events_async = sim.get_kv_cache_events_async
        self.get_kv_cache_events = sim.get_kv_cache_events
        self.generate_async = _with_faults(sim)
        # No row counts a parked handoff as active (py_executor id 4553249729 `_handle_responses`).
        self.get_stats_async, self.get_stats = sim.get_stats_async, sim.get_stats
        if self.api.version not in ("1.1", "1.2"):
            self.get_kv_cache_capacity = lambda: _capacity(sim)
            self._check_health = lambda: _check(sim)
        self._executor = sim._executor
        self.shutdown = lambda: _shut_down(sim, transport)


def _fail_init(init: object) -> None:
    if init == "hang":
        threading.Event().wait()
    if init in INIT_ERRORS:
        raise INIT_ERRORS[init]


def _encoder(make: Callable[..., Any], init: object) -> Callable[..., Any]:
    """An encoder's constructor, which fails as `init` says."""

    def constructed(*args: Any, **kwargs: Any) -> Any:
        _fail_init(init)
        return make(*args, **kwargs)

    return constructed


def _report(args: Any, *, reports: bool) -> None:
    """Say on stderr where TensorRT-LLM would report to NVIDIA: by default, since pull request #12384.

    It has three variables against that (usage/config.py), later an argument, too (#14398); `reports` is a
    candidate of 1.3 in between, without the argument.
    """
    config = getattr(args, "telemetry_config", None)
    variables = ("TRTLLM_NO_USAGE_STATS", "TELEMETRY_DISABLED", "DO_NOT_TRACK")
    is_off = any(os.environ.get(name) == "1" for name in variables) or (config and config.disabled)
    if (reports or config is not None) and not is_off:
        print(json.dumps({"event": "double.telemetry"}), file=sys.stderr, flush=True)


def _shut_down(sim: Any, transport: SharedMemoryTransport | None) -> None:
    executor = sim._executor
    if executor is not None and (executor.is_shutdown() or executor.mpi_futures[0].done()):
        threading.Event().wait()  # for ranks that are dead
    sim.shutdown()
    if transport is not None:
        transport.close()


def _capacity(sim: Any) -> dict[str, Any]:
    """Blocks its caller for a call to another process: rpc_client.py @fbbc05dd, `_call_sync`."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise AssertionError("get_kv_cache_capacity() would block the event loop")
    found: dict[str, Any] = sim.get_kv_cache_capacity()
    return found


def _check(sim: Any) -> bool:
    if getattr(sim, "check_hangs", False):
        threading.Event().wait()
    return bool(sim._check_health())


def _with_faults(sim: Any) -> Callable[..., Any]:
    @functools.wraps(sim.generate_async)
    def generate_async(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        first = inputs[0] if isinstance(inputs, list) else None
        if first == Fault.REFUSE:
            raise ValueError("the prompt is refused")
        if first == Fault.CHECK_HANGS:
            sim.check_hangs = True
        if first in (Fault.HANG, Fault.EMPTY, Fault.CHECK_HANGS):
            return _Stuck(ends=first == Fault.EMPTY)
        result = sim.generate_async(inputs, *args, **kwargs)
        if first == Fault.FAIL:
            sim.inject_request_error(result.request_id, "the request failed")
        if first == Fault.QUIT:
            sim.inject_death(RuntimeError("rank 0 died"))
        if first == Fault.DIE:
            sim.inject_fatal(RuntimeError("the event loop of rank 0 was terminated"))
        return _WithoutHandoff(result) if first == Fault.NO_HANDOFF else result

    return generate_async


class _Stuck:
    """A result that never changes; with `ends` it stops at once, without an end of its outputs."""

    def __init__(self, *, ends: bool) -> None:
        self.outputs = [
            SimpleNamespace(
                token_ids=[],
                finish_reason=None,
                disaggregated_params=None,
                request_perf_metrics=None,
            )
        ]
        self.cached_tokens = 0
        self._ends = ends

    def abort(self) -> None:
        """Has no effect: nobody works on it."""

    async def aresult(self) -> "_Stuck":
        async for _ in self:
            pass
        return self

    def __aiter__(self) -> "_Stuck":
        return self

    async def __anext__(self) -> "_Stuck":
        if not self._ends:
            await anyio.sleep_forever()
        raise StopAsyncIteration


class _WithoutHandoff:
    """A context_only result whose params stayed what they were in the request."""

    def __init__(self, result: RequestOutput) -> None:
        self._result = result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)

    def __aiter__(self) -> "_WithoutHandoff":
        return self

    async def __anext__(self) -> "_WithoutHandoff":
        await self._result.__anext__()
        self._result.outputs[0].disaggregated_params = None
        return self


class DoubleCollector:
    """`tensorrt_llm.metrics.MetricsCollector`, with a family of each kind; in the default registry."""

    def __init__(self, labels: dict[str, str]) -> None:
        names = list(labels)
        success = prometheus_client.Counter(
            "trtllm_request_success", "Requests that succeeded.", [*names, "finished_reason"]
        )
        self._labels, self._success = labels, success
        self._ttft = prometheus_client.Histogram(
            "trtllm_time_to_first_token_seconds", "Time to first token.", names
        ).labels(**labels)
        self._utilization = prometheus_client.Gauge(
            "trtllm_kv_cache_utilization", "KV cache utilization.", names
        ).labels(**labels)

    def log_request_metrics_dict(self, metrics: dict[str, Any]) -> None:
        self._success.labels(**self._labels, finished_reason=metrics["finished_reason"]).inc()
        self._ttft.observe(metrics["ttft"])

    def log_iteration_stats(self, stats: dict[str, Any]) -> None:
        cache = stats["kvCacheStats"]
        self._utilization.set(cache["usedNumBlocks"] / cache["maxNumBlocks"])


class OldCollector(DoubleCollector):
    """The same, of 1.2."""

    log_metrics_dict = DoubleCollector.log_request_metrics_dict
    log_request_metrics_dict = None  # type: ignore[assignment]


def _ids(version: str) -> Callable[..., int] | None:
    """`get_global_disagg_request_id` of a version; None before 1.3."""
    makers: dict[tuple[int, int], DisaggIds] = {}

    def new(place: tuple[int, int]) -> int:
        return makers.setdefault(place, DisaggIds(*place)).next(anyio.current_time())

    def of_machine(machine_id: int) -> int:
        assert 0 <= machine_id < 1024
        return new(divmod(machine_id, 64))

    def of_process(node_id: int, process_id: int = 0) -> int:
        return new((node_id, process_id))

    makers_of: dict[str, Callable[..., int]] = {"1.3rc": of_machine, "1.4rc": of_process}
    return makers_of.get(version)


def args_model(
    lacks: frozenset[str], of: type[BaseModel] = TorchLlmArgs, prefix: str = ""
) -> type[BaseModel]:
    """The model of a version's arguments, or of a section of them, with a JSON Schema of its own."""
    fields: dict[str, Any] = {}
    for name, field in of.model_fields.items():
        dotted = f"{prefix}{name}"
        if dotted not in lacks:
            of_version = copy(field)
            if (choice := f"{dotted}={field.default}") in lacks:
                of_version.default = EARLIER_DEFAULTS.get(choice, field.default)
            fields[name] = (_narrowed(field.annotation, dotted, lacks), of_version)
    made: type[BaseModel] = create_model(
        of.__name__, __config__=of.model_config, __module__="tensorrt_llm.llmapi.llm_args", **fields
    )
    return made


def _narrowed(annotation: Any, dotted: str, lacks: frozenset[str]) -> Any:
    """A field's type without the choices and fields that a version lacks."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        left = tuple(one for one in parts if f"{dotted}={one}" not in lacks)
        return Literal[left] if left else None
    if origin in (Union, UnionType):
        narrowed = [_narrowed(one, dotted, lacks) for one in parts]
        return Union[tuple(one for one in narrowed if one is not None)]  # noqa: UP007
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return args_model(lacks, annotation, f"{dotted}.")
    return annotation


def install(package: ModuleType) -> None:
    """Fill the package, and put what is below it into `sys.modules`, as the environment says."""
    settings = json.loads(os.environ.get(ENVIRONMENT, "{}"))
    api = sim_api(settings.pop("api", NEWEST))
    imports_bindings = settings.pop("bindings", False)
    llm = type("LLM", (DoubleLLM,), {"api": api, "settings": settings})
    encoder = api.MultimodalEncoder and _encoder(api.MultimodalEncoder, settings.get("init"))
    names: dict[str, dict[str, Any]] = {
        "": {"LLM": llm, "MultimodalEncoder": encoder, "__version__": api.version},
        "llmapi": {"DisaggregatedParams": api.DisaggregatedParams},
        "llmapi.llm": {"SamplingParams": api.SamplingParams},
        "llmapi.disagg_utils": {},
        # Newer ones read sections from dicts by themselves, and their class has no `from_dict`.
        "llmapi.llm_args": {
            "DecodingBaseConfig": DecodingSection11
            if DECODING_TYPE in LACKS[api.version]
            else EagleDecodingConfig,
            "TorchLlmArgs": args_model(LACKS[api.version]),
        },
        "executor": {},
        "executor.utils": {
            name: getattr(api, name)
            for name in ("RequestError", "EngineDeadError")
            if hasattr(api, name)
        },
        "executor.result": {"Logprob": api.Logprob},
        "_utils": {"KVCacheEventSerializer": api.KVCacheEventSerializer},
        "sampling_params": {"LogitsProcessor": api.LogitsProcessor},
        "scheduling_params": {"SchedulingParams": api.SchedulingParams},
        "metrics": {
            "MetricsCollector": OldCollector if api.version in ("1.1", "1.2") else DoubleCollector
        },
    }
    make_id = _ids(api.version)
    if make_id is not None:
        names["llmapi.disagg_utils"]["get_global_disagg_request_id"] = make_id
    for path, members in names.items():
        module = package
        if path:
            module = ModuleType(f"{package.__name__}.{path}")
            module.__path__ = []
            sys.modules[module.__name__] = module
        vars(module).update(members)
    if imports_bindings:
        importlib.import_module(f"{package.__name__}.grpc.openengine")
