"""Settings that only the simulated engine has, and the sizes of its KV cache that follow from them."""

from collections.abc import Callable
from dataclasses import dataclass

from slagate.workers.kv_transfer.transport import KvTransport
from slagate.workers.profiles.profile import TpProfile
from slagate.workers.sim.args import KvCacheConfig, TorchLlmArgs
from slagate.workers.sim.sampling import LogprobForm

VOCAB_SIZE = 128_256
"""The default number of tokens in the vocabulary: Llama 3's."""

END_ID = 128_001
"""The end-of-text token of that vocabulary."""

# The share of free GPU memory at which a profile's KV capacity was measured: TensorRT-LLM's default.
_PROFILE_MEMORY_RATIO = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """The simulated machine and model, and the faults of the engine.

    `transport` serves one engine only, and only when `cache_transceiver_config` is given. `end_id` None is
    `END_ID`, or the last token of a smaller vocabulary. `instance_salt` makes this engine's block hashes
    differ from those of others. The constructor waits `init_s` seconds by `pause`, then raises `fail_init`
    if that is set. With `handoff_on_stop` a context_only request whose first token ends it still gives a
    handoff. Raises `ValueError` naming the field.
    """

    profile: TpProfile
    transport: KvTransport | None = None
    vocab_size: int = VOCAB_SIZE
    end_id: int | None = None
    model_max_seq_len: int = 131_072
    kv_block_bytes: int = 4096
    time_scale: float = 1.0
    transfer_bytes_per_s: float = 50e9
    host_link_bytes_per_s: float = 25e9
    node_id: int = 0
    process_id: int = 0
    instance_salt: bytes = b""
    n_gpus: int = 8
    init_s: float = 0.0
    pause: Callable[[float], object] | None = None
    fail_init: Exception | None = None
    logprob_form: LogprobForm = "dict"
    handoff_on_stop: bool = False

    def __post_init__(self) -> None:
        if not self.vocab_size > 0:
            raise ValueError(f"vocab_size must be > 0, got {self.vocab_size}")
        if self.kv_block_bytes < 16 or self.kv_block_bytes % 16:
            raise ValueError(
                f"kv_block_bytes must be a positive multiple of 16: {self.kv_block_bytes}"
            )
        if self.init_s > 0 and self.pause is None:
            raise ValueError("init_s needs pause, the function that waits")

    @property
    def tokenizer_end_id(self) -> int:
        """The tokenizer's end-of-text token."""
        return min(END_ID, self.vocab_size - 1) if self.end_id is None else self.end_id


def primary_blocks(profile: TpProfile, config: KvCacheConfig) -> int:
    """KV blocks of one rank on the GPU. Raises `ValueError` when not even one fits."""
    ratio = config.free_gpu_memory_fraction / _PROFILE_MEMORY_RATIO
    tokens = int(profile.kv_capacity_tokens * ratio)
    if config.max_tokens is not None:
        tokens = min(tokens, config.max_tokens)
    blocks = tokens // config.tokens_per_block
    if blocks < 1:
        raise ValueError(f"kv_cache_config: {tokens} tokens are less than one block")
    return blocks


def host_blocks(profile: TpProfile, config: KvCacheConfig) -> int:
    """KV blocks of one rank in host memory, at the true size of a token's KV cache."""
    if not config.onboard_blocks:
        return 0
    block_bytes = config.tokens_per_block * profile.kv_bytes_per_token
    return (config.host_cache_size or 0) // block_bytes


def attention_windows(args: TorchLlmArgs, max_seq_len: int) -> tuple[int, ...]:
    """The distinct attention windows in tokens, in the order of the layers."""
    windows = args.kv_cache_config.max_attention_window or [max_seq_len]
    return tuple(dict.fromkeys(min(window, max_seq_len) for window in windows))
