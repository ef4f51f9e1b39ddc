"""The TensorRT-LLM versions that can be imitated, each with the names that a caller would import.

    version  like                        in comparison
    1.1      1.1 and 1.2 candidates      no priority, no `trace_headers`, no `_check_health`, no
                                         `get_kv_cache_capacity`; polled through queues
    1.2      1.2                         `trace_headers`; polled by calls to the engine's process
    1.3rc    early 1.3 candidates        ids of both phases in the disaggregated params, priority
    1.4rc    late 1.3 candidates, main   conversations, `preprocess`, newest keys of events and stats

Signatures really differ: an argument that a version does not have is a `TypeError`, as it is there.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from slagate.workers.sim.encoder import (
    MultimodalEncoder12,
    MultimodalEncoder13,
    MultimodalEncoder14,
)
from slagate.workers.sim.kv_cache.events import KVCacheEventSerializer, KVCacheEventSerializer12
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.outputs import RequestOutput
from slagate.workers.sim.request import (
    DEFAULT_REQUEST_PRIORITY,
    ApiTraits,
    ConversationParams,
    DisaggregatedParams,
    DisaggregatedParams12,
    DisaggregatedParams13,
    EngineDeadError,
    PreprocessedInputs,
    RequestError,
    SamplingParams,
    SamplingParams12,
    SamplingParams13,
    SchedulingParams,
    SchedulingParams12,
    SimLogitsProcessor,
)
from slagate.workers.sim.sampling import Logprob
from slagate.workers.sim.submit import Submission


def _generate_async(
    self: SimLLM,
    inputs: Any,
    sampling_params: Any = None,
    lora_request: object | None = None,
    prompt_adapter_request: object | None = None,
    streaming: bool = False,  # noqa: FBT001, FBT002
    kv_cache_retention_config: object | None = None,
    disaggregated_params: Any = None,
    trace_headers: Mapping[str, str] | None = None,
    _postproc_params: object | None = None,
    scheduling_params: Any = None,
    conversation_params: Any = None,
    cache_salt: str | None = None,
    priority: float = DEFAULT_REQUEST_PRIORITY,
) -> RequestOutput:
    """Submit a request. Raises as `SimLLM` says; its iterator raises `RequestError`."""
    del prompt_adapter_request, kv_cache_retention_config, trace_headers, _postproc_params
    if not isinstance(conversation_params, (ConversationParams, type(None))):
        name = type(conversation_params).__name__
        raise TypeError(f"conversation_params must be ConversationParams, not {name}")
    return self._submit(
        Submission(
            inputs=inputs,
            sampling_params=sampling_params,
            lora_request=lora_request,
            streaming=streaming,
            disaggregated_params=disaggregated_params,
            scheduling_params=scheduling_params,
            cache_salt=cache_salt,
            priority=priority,
        )
    )


def _without(*names: str) -> Callable[..., RequestOutput]:
    """The newest `generate_async` without these arguments, for a version before they came."""
    newest = inspect.signature(_generate_async)
    signature = newest.replace(
        parameters=[each for each in newest.parameters.values() if each.name not in names]
    )

    def generate_async(*args: Any, **kwargs: Any) -> RequestOutput:
        return _generate_async(**signature.bind(*args, **kwargs).arguments)

    generate_async.__doc__ = _generate_async.__doc__
    # The adapter asks `inspect.signature` which arguments a version has.
    generate_async.__signature__ = signature  # type: ignore[attr-defined]
    return generate_async


class Llm11(SimLLM):
    """`tensorrt_llm.LLM` of 1.1 and of the candidates of 1.2."""

    traits = ApiTraits(
        version="1.1",
        sampling_params=SamplingParams12,
        disaggregated_params=DisaggregatedParams12,
        scheduling_params=SchedulingParams12,
        overlong_error=ValueError,
        polled_by_call=False,
        newest_events=False,
        event_serializer=KVCacheEventSerializer12,
        counts_kv_tokens=False,
        copies_rows=False,
        gathers_rows=False,
        counts_host_blocks=True,
        stats_by_window=False,
        reports_first=False,
        dies_of_overlap=True,
        flags_death=False,
        tells_death=False,
        ends_apart=False,
        ignores_stops=False,
        min_counts_prompt=True,
    )
    generate_async = _without("trace_headers", "conversation_params", "priority")


class Llm12(Llm11):
    """`tensorrt_llm.LLM` of 1.2."""

    traits = replace(Llm11.traits, version="1.2", polled_by_call=True)
    generate_async = _without("conversation_params", "priority")


class Llm13(Llm12):
    """`tensorrt_llm.LLM` of early 1.3 candidates."""

    traits = replace(
        Llm12.traits,
        version="1.3rc",
        sampling_params=SamplingParams13,
        disaggregated_params=DisaggregatedParams13,
        overlong_error=RequestError,
        counts_kv_tokens=True,
        event_serializer=KVCacheEventSerializer,
        copies_rows=True,
        gathers_rows=True,
        stats_by_window=True,
        dies_of_overlap=False,
        flags_death=True,
        ends_apart=True,
        ignores_stops=True,
    )
    generate_async = _without("conversation_params")

    def _check_health(self) -> bool:
        return self._executor is not None and self._executor.check_health()

    def get_kv_cache_capacity(self) -> dict[str, Any]:
        """Size of the KV cache on the GPU, of one rank."""
        blocks, block_tokens = self._ranks[0].cache.total_blocks, self._block_tokens
        return {
            "maxNumBlocks": blocks,
            "tokensPerBlock": block_tokens,
            "maxNumTokens": blocks * block_tokens,
        }


class Llm14(Llm13):
    """`tensorrt_llm.LLM` of the newest source."""

    traits = replace(
        Llm13.traits,
        version="1.4rc",
        sampling_params=SamplingParams,
        disaggregated_params=DisaggregatedParams,
        scheduling_params=SchedulingParams,
        newest_events=True,
        gathers_rows=False,
        counts_host_blocks=False,
        reports_first=True,
        tells_death=True,
        min_counts_prompt=False,
    )
    generate_async = _generate_async

    def preprocess(self, inputs: Any) -> PreprocessedInputs:
        """A prompt as token ids, for `generate_async`. Raises as that does for a bad prompt."""
        return PreprocessedInputs(self._checker.prompt_of(inputs).tokens)

    @override
    def get_kv_cache_capacity(self) -> dict[str, Any]:
        return {
            **super().get_kv_cache_capacity(),
            "kvEventsEnabled": self._engine.events.max_events > 0,
        }


@dataclass(slots=True)
class SimApi:
    """The importable names of one version. They can be set, as those of the package itself can."""

    version: str
    LLM: type[SimLLM]
    MultimodalEncoder: type[MultimodalEncoder12]
    SamplingParams: type[SamplingParams12]
    DisaggregatedParams: type[DisaggregatedParams12]
    SchedulingParams: type[SchedulingParams12]
    RequestError: type[RequestError] = RequestError
    LogitsProcessor: Any = SimLogitsProcessor
    Logprob: Any = Logprob
    KVCacheEventSerializer: type[KVCacheEventSerializer12] = KVCacheEventSerializer


@dataclass(slots=True)
class SimApi13(SimApi):
    """The importable names of the 1.3 candidates."""

    DEFAULT_REQUEST_PRIORITY: float = DEFAULT_REQUEST_PRIORITY


@dataclass(slots=True)
class SimApi14(SimApi13):
    """The importable names of the newest source."""

    ConversationParams: type[ConversationParams] = ConversationParams
    PreprocessedInputs: type[PreprocessedInputs] = PreprocessedInputs
    EngineDeadError: type[EngineDeadError] = EngineDeadError


def _api(kind: type[SimApi], llm: type[SimLLM], encoder: type[MultimodalEncoder12]) -> SimApi:
    return kind(
        llm.traits.version,
        LLM=llm,
        MultimodalEncoder=encoder,
        SamplingParams=llm.traits.sampling_params,
        DisaggregatedParams=llm.traits.disaggregated_params,
        SchedulingParams=llm.traits.scheduling_params,
        KVCacheEventSerializer=llm.traits.event_serializer,
    )


_APIS: dict[str, SimApi] = {
    "1.1": _api(SimApi, Llm11, MultimodalEncoder12),
    "1.2": _api(SimApi, Llm12, MultimodalEncoder12),
    "1.3rc": _api(SimApi13, Llm13, MultimodalEncoder13),
    "1.4rc": _api(SimApi14, Llm14, MultimodalEncoder14),
}

VERSIONS = tuple(_APIS)


NEWEST = VERSIONS[-1]


def sim_api(version: str = NEWEST) -> SimApi:
    """The names of one version. Raises `ValueError` for a version that is not imitated."""
    if version not in _APIS:
        raise ValueError(f"version must be one of {', '.join(_APIS)}: {version}")
    return _APIS[version]
