"""What differs between the TensorRT-LLM versions that the simulated engine imitates, besides signatures."""

from dataclasses import dataclass

from slagate.workers.sim.request import DisaggregatedParams12, SamplingParams12, SchedulingParams12


@dataclass(frozen=True, slots=True)
class ApiTraits:
    """One version's types and shapes.

    `nests_events`: a KV event poll yields lists of events, not events. `newest_events` adds keys to them.
    `counts_kv_tokens`: iteration stats have the KV token counts that TensorRT-LLM got in its pull request
    #13199. `overlong_error` is raised for a prompt above `max_num_tokens` without chunked prefill.
    """

    version: str
    sampling_params: type[SamplingParams12]
    disaggregated_params: type[DisaggregatedParams12]
    scheduling_params: type[SchedulingParams12]
    overlong_error: type[Exception]
    nests_events: bool
    newest_events: bool
    counts_kv_tokens: bool
