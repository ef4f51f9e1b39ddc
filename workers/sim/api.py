"""The TensorRT-LLM versions that can be imitated, each as the names that a caller would import.

    version  like                   in comparison
    1.2      1.1 and 1.2            no priority, no `_check_health`, no `get_kv_cache_capacity`;
                                    1.1 and early 1.2 candidates: no `trace_headers` either
    1.3rc    early 1.3 candidates   flat KV events, ids of both phases in the disaggregated params
    main     1.3.0rc27 and later    conversations, `preprocess`, newest keys of events and stats

Signatures really differ, so that a caller who passes what a version does not know fails as it would.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from slagate.workers.sim.encoder import (
    MultimodalEncoder12,
    MultimodalEncoder13,
    MultimodalEncoderMain,
)
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.outputs import RequestOutput
from slagate.workers.sim.request import (
    DEFAULT_REQUEST_PRIORITY,
    ApiTraits,
    ConversationParams,
    DisaggregatedParams,
    DisaggregatedParams12,
    DisaggregatedParams13,
    PreprocessedInputs,
    RequestError,
    SamplingParams,
    SamplingParams12,
    SchedulingParams,
    SchedulingParams12,
    SimLogitsProcessor,
)
from slagate.workers.sim.submit import Submission


class Llm12(SimLLM):
    """`tensorrt_llm.LLM` of 1.2."""

    traits = ApiTraits(
        version="1.2",
        sampling_params=SamplingParams12,
        disaggregated_params=DisaggregatedParams12,
        scheduling_params=SchedulingParams12,
        overlong_error=ValueError,
        nests_events=True,
        newest_events=False,
        counts_kv_tokens=False,
    )

    def generate_async(
        self,
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
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Submit a request. Raises as `SimLLM` says; its iterator raises `RequestError`."""
        del prompt_adapter_request, kv_cache_retention_config, trace_headers, _postproc_params
        return self._submit(
            Submission(
                inputs=inputs,
                sampling_params=sampling_params,
                lora_request=lora_request,
                streaming=streaming,
                disaggregated_params=disaggregated_params,
                scheduling_params=scheduling_params,
                cache_salt=cache_salt,
            )
        )


class Llm12WithoutTraceHeaders(SimLLM):
    """`tensorrt_llm.LLM` of 1.1 and early candidates of 1.2."""

    traits = Llm12.traits

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: object | None = None,
        prompt_adapter_request: object | None = None,
        streaming: bool = False,  # noqa: FBT001, FBT002
        kv_cache_retention_config: object | None = None,
        disaggregated_params: Any = None,
        _postproc_params: object | None = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Submit a request. Raises as `SimLLM` says; its iterator raises `RequestError`."""
        del prompt_adapter_request, kv_cache_retention_config, _postproc_params
        return self._submit(
            Submission(
                inputs=inputs,
                sampling_params=sampling_params,
                lora_request=lora_request,
                streaming=streaming,
                disaggregated_params=disaggregated_params,
                scheduling_params=scheduling_params,
                cache_salt=cache_salt,
            )
        )


Version = Literal["1.2", "1.3rc", "main"]


class _Inspectable(SimLLM):
    """What came after 1.2 besides arguments."""

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


class Llm13(_Inspectable):
    """`tensorrt_llm.LLM` of early 1.3 candidates."""

    traits = ApiTraits(
        version="1.3rc",
        sampling_params=SamplingParams12,
        disaggregated_params=DisaggregatedParams13,
        scheduling_params=SchedulingParams12,
        overlong_error=RequestError,
        nests_events=False,
        newest_events=False,
        counts_kv_tokens=True,
    )

    def generate_async(
        self,
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
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput:
        """Submit a request. Raises as `SimLLM` says; its iterator raises `RequestError`."""
        del prompt_adapter_request, kv_cache_retention_config, trace_headers, _postproc_params
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


class LlmMain(_Inspectable):
    """`tensorrt_llm.LLM` of the newest source."""

    traits = ApiTraits(
        version="main",
        sampling_params=SamplingParams,
        disaggregated_params=DisaggregatedParams,
        scheduling_params=SchedulingParams,
        overlong_error=RequestError,
        nests_events=False,
        newest_events=True,
        counts_kv_tokens=True,
    )

    def generate_async(
        self,
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

    def preprocess(self, inputs: Any) -> PreprocessedInputs:
        """A prompt as token ids, for `generate_async`. Raises as that does for a bad prompt."""
        return PreprocessedInputs(self._checker.prompt_of(inputs).tokens)

    def get_kv_cache_capacity(self) -> dict[str, Any]:
        """As in earlier versions, and whether there are KV cache events."""
        return {
            **super().get_kv_cache_capacity(),
            "kvEventsEnabled": self._engine.events.max_events > 0,
        }


@dataclass(slots=True)
class SimApi:
    """The importable names of one version; it lacks those that the version lacks.

    Names can be set, as those of the package that this stands in for can.
    """

    version: Version
    LLM: type[SimLLM]
    MultimodalEncoder: type[MultimodalEncoder12]
    SamplingParams: type[SamplingParams12]
    DisaggregatedParams: type[DisaggregatedParams12]
    SchedulingParams: type[SchedulingParams12]
    RequestError: type[RequestError] = RequestError
    LogitsProcessor: Any = SimLogitsProcessor


@dataclass(slots=True)
class SimApi13(SimApi):
    """As `SimApi`, with what came with 1.3."""

    DEFAULT_REQUEST_PRIORITY: float = DEFAULT_REQUEST_PRIORITY


@dataclass(slots=True)
class SimApiMain(SimApi13):
    """As `SimApi13`, with the newest names."""

    ConversationParams: type[ConversationParams] = ConversationParams
    PreprocessedInputs: type[PreprocessedInputs] = PreprocessedInputs


_APIS: dict[str, SimApi] = {
    "1.2": SimApi(
        "1.2",
        LLM=Llm12,
        MultimodalEncoder=MultimodalEncoder12,
        SamplingParams=SamplingParams12,
        DisaggregatedParams=DisaggregatedParams12,
        SchedulingParams=SchedulingParams12,
    ),
    "1.3rc": SimApi13(
        "1.3rc",
        LLM=Llm13,
        MultimodalEncoder=MultimodalEncoder13,
        SamplingParams=SamplingParams12,
        DisaggregatedParams=DisaggregatedParams13,
        SchedulingParams=SchedulingParams12,
    ),
    "main": SimApiMain(
        "main",
        LLM=LlmMain,
        MultimodalEncoder=MultimodalEncoderMain,
        SamplingParams=SamplingParams,
        DisaggregatedParams=DisaggregatedParams,
        SchedulingParams=SchedulingParams,
    ),
}

VERSIONS = tuple(_APIS)


def sim_api(version: str = "main", *, trace_headers: bool = True) -> SimApi:
    """The names of one version; without `trace_headers` it is 1.2 of the time before there were any.

    Raises `ValueError` for one that is not imitated.
    """
    if version not in _APIS:
        raise ValueError(f"version must be one of {', '.join(_APIS)}: {version}")
    if trace_headers:
        return _APIS[version]
    if version != "1.2":
        raise ValueError(f"trace_headers: every {version} has them")
    return replace(_APIS[version], LLM=Llm12WithoutTraceHeaders)
