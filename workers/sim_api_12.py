"""`tensorrt_llm.LLM` of 1.2, and of the time before its requests took trace headers."""

from collections.abc import Mapping
from typing import Any

from slagate.workers.sim_llm import SimLLM
from slagate.workers.sim_outputs import RequestOutput
from slagate.workers.sim_request import (
    DisaggregatedParams12,
    SamplingParams12,
    SchedulingParams12,
)
from slagate.workers.sim_submit import Submission
from slagate.workers.sim_traits import ApiTraits


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
