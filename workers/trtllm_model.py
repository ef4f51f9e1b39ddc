"""`ModelInfo` of a TensorRT-LLM worker: only what it really does is claimed."""

from slagate.proto import openengine_pb2 as oe
from slagate.workers.trtllm_engine import Engine
from slagate.workers.trtllm_info import WorkerIdentity
from slagate.workers.trtllm_sampling import MAX_TOP_N, max_sequences


def model_info(engine: Engine, identity: WorkerIdentity) -> oe.ModelInfo:
    """The one served model."""
    hands_off = identity.role != oe.ENGINE_ROLE_AGGREGATED
    logprobs = oe.LogprobCapabilities(
        supported=True,
        candidate_selection_modes=[oe.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
        max_top_n=MAX_TOP_N,
    )
    return oe.ModelInfo(
        model_id=identity.model,
        served_model_name=identity.model,
        max_context_length=engine.window_tokens,
        supports_text_input=False,
        supports_token_ids_input=True,
        supports_lora=False,
        supports_multimodal=False,
        generation=oe.GenerationCapabilities(
            # A decode leg's prompt was another engine's.
            prompt_logprobs=oe.LogprobCapabilities(supported=False)
            if identity.role == oe.ENGINE_ROLE_DECODE
            else logprobs,
            output_logprobs=logprobs,
            guided_decoding=oe.GuidedDecodingCapabilities(supported=False),
            max_num_sequences=max_sequences(engine, hands_off=hands_off),
            supports_priority=False,
            supports_stop_in_output=True,
            supports_cache_salt=engine.takes("cache_salt"),
            supports_prefix_cache_bypass=False,
        ),
    )
