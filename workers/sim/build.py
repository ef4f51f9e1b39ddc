"""The simulated engine that constructor arguments and settings ask for."""

import math

from slagate.workers.profiles.profile import TpProfile
from slagate.workers.sim.args import KvCacheConfig, SimSettings, TorchLlmArgs
from slagate.workers.sim.engine import SimEngine
from slagate.workers.sim.handoff import DisaggIds
from slagate.workers.sim.kv_cache.cache import SimKvCache
from slagate.workers.sim.kv_cache.events import V1_BLOCK_KEY, KvEventQueue, KvEventRecorder
from slagate.workers.sim.rank import SimRank
from slagate.workers.sim.request import ApiTraits
from slagate.workers.sim.sequence import EngineLimits, KvLayout
from slagate.workers.sim.stats import BlockPools, StatsQueue
from slagate.workers.sim.timing import EngineTiming

MODEL_KV_DTYPE = "bfloat16"
"""The KV type of the simulated models, which `auto` stands for."""

# The share of free GPU memory at which a profile's KV capacity was measured: TensorRT-LLM's default.
_PROFILE_MEMORY_RATIO = 0.9


def build_engine(
    args: TorchLlmArgs, settings: SimSettings, *, traits: ApiTraits, max_seq_len: int
) -> SimEngine:
    """The engine with its ranks and queues.

    Raises `ValueError` naming arguments that do not fit, and `RuntimeError` as `uses_cache_v2`.
    """
    config, transceiver = args.kv_cache_config, args.cache_transceiver_config
    if args.has_transceiver and settings.transport is None:
        raise ValueError("cache_transceiver_config needs a transport in the settings")
    if settings.tokens_per_step > 1 and args.speculative_config is None:
        raise ValueError("tokens_per_step over 1 needs a speculative_config")
    limits = EngineLimits(
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        block_tokens=config.tokens_per_block,
        vocab_size=settings.vocab_size,
        kv_block_bytes=settings.kv_block_bytes,
        chunked_prefill=args.enable_chunked_prefill,
        # Of 0 tokens, a buffer is made for each prompt.
        max_tokens_in_buffer=(transceiver and transceiver.max_tokens_in_buffer) or None,
        tokens_per_step=settings.tokens_per_step,
        kv_layout=kv_layout(args, settings, version=traits.version),
    )
    # With attention DP one buffer takes the events of all ranks, and is as many times as large.
    events = KvEventQueue(config.event_buffer_max_size * args.attention_dp_size)
    ranks = _ranks(
        args, settings, traits=traits, limits=limits, events=events, max_seq_len=max_seq_len
    )
    timeout_ms = None if transceiver is None else transceiver.kv_transfer_timeout_ms
    # As many iterations, each with a row a rank; versions that do not let it be chosen have the default.
    max_records = getattr(args, "max_stats_len", 1000) * args.attention_dp_size
    return SimEngine(
        limits,
        timing=EngineTiming(
            settings.profile,
            time_scale=settings.time_scale,
            transfer_bytes_per_s=settings.transfer_bytes_per_s,
            host_link_bytes_per_s=settings.host_link_bytes_per_s,
        ),
        ranks=ranks,
        events=events,
        stats=StatsQueue(
            limits,
            traits=traits,
            pools=BlockPools(
                primary=ranks[0].cache.total_blocks,
                secondary=next(iter(ranks[0].cache.lower_blocks), 0),
                windows=attention_windows(args, max_seq_len),
                has_groups=limits.kv_layout.manager == "V2",
            ),
            max_records=max_records if args.enable_iter_perf_stats else 0,
        ),
        transport=settings.transport if args.has_transceiver else None,
        # Without a limit TensorRT-LLM keeps a handoff until it is fetched.
        handoff_timeout_s=math.inf if timeout_ms is None else timeout_ms / 1000,
        disagg_ids=DisaggIds(settings.node_id, settings.process_id),
        conditions=settings.conditions,
    )


def _ranks(
    args: TorchLlmArgs,
    settings: SimSettings,
    *,
    traits: ApiTraits,
    limits: EngineLimits,
    events: KvEventQueue,
    max_seq_len: int,
) -> list[SimRank]:
    """The ranks with their caches, which record `events` unless these are off."""
    config, n_ranks = args.kv_cache_config, args.attention_dp_size
    is_v2 = uses_cache_v2(args, settings)
    ranks = []
    for index in range(n_ranks):
        recorder = None
        if events.max_events:
            recorder = KvEventRecorder(
                events,
                rank=index if n_ranks > 1 else None,
                windows=attention_windows(args, max_seq_len),
                block_tokens=limits.block_tokens,
                salt=settings.instance_salt,
                newest=traits.newest_events,
                serializer=traits.event_serializer,
                is_v2=is_v2,
                hash_algo=event_hash_algo(config, is_v2=is_v2),
            )
        cache = SimKvCache(
            primary_blocks(settings.profile, config),
            config.tokens_per_block,
            lower_blocks=lower_blocks(settings.profile, config, is_v2=is_v2),
            reuse=config.enable_block_reuse,
            partial_reuse=config.enable_partial_reuse,
            recorder=recorder,
        )
        ranks.append(SimRank(index, cache, limits, recorder=recorder))
    return ranks


def uses_cache_v2(args: TorchLlmArgs, settings: SimSettings) -> bool:
    """Whether the engine's cache manager is V2, which it works out in its own process, on its own copy.

    "auto" is what the model prefers (llm_utils.py id 54619642641 `_resolve_kv_cache_manager_v2_auto`), and
    V1 where handoffs take another way than NIXL with the Python runtime (by the text of TensorRT-LLM's pull
    request #16942). Raises `RuntimeError`, as what fails in that process ends the constructor, for V2 with
    the C++ transceiver, which moves V1 caches only (README id 57362347703).
    """
    setting: bool | str = getattr(args.kv_cache_config, "use_kv_cache_manager_v2", False)
    transceiver = args.cache_transceiver_config
    moves_v2 = not args.has_transceiver
    if transceiver is not None and transceiver.backend in ("DEFAULT", "NIXL"):
        moves_v2 = getattr(transceiver, "transceiver_runtime", None) == "PYTHON"
    if setting == "auto":
        return settings.prefers_cache_v2 and moves_v2
    if setting and not moves_v2:
        raise RuntimeError("the C++ cache transceiver does not support the V2 KV cache manager")
    return bool(setting)


def kv_layout(args: TorchLlmArgs, settings: SimSettings, *, version: str) -> KvLayout:
    """How the engine's KV cache lies and moves.

    DEFAULT is UCX in 1.1 and NIXL since (kv_cache_transceiver.py id 616290201).
    """
    transceiver, dtype = args.cache_transceiver_config, args.kv_cache_config.dtype
    backend = None if transceiver is None else transceiver.backend
    runtime = getattr(transceiver, "transceiver_runtime", None)
    return KvLayout(
        backend=("UCX" if version == "1.1" else "NIXL")
        if backend in (None, "DEFAULT")
        else backend,
        runtime="PYTHON" if runtime == "PYTHON" else "CPP",
        dtype=MODEL_KV_DTYPE if dtype == "auto" else dtype,
        manager="V2" if uses_cache_v2(args, settings) else "V1",
    )


def event_hash_algo(config: KvCacheConfig, *, is_v2: bool) -> str:
    """The algorithm of the hashes in events; "auto" is V1's (kv_cache_hash.py id 52211798789)."""
    algorithm: str = getattr(config, "kv_cache_event_hash_algo", "auto")
    return algorithm if is_v2 and algorithm != "auto" else V1_BLOCK_KEY


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


def lower_blocks(profile: TpProfile, config: KvCacheConfig, *, is_v2: bool) -> list[int]:
    """KV blocks of one rank on the host and, of the V2 manager, on disk, without levels that have none.

    A block has the true size of its tokens' KV cache. Without a host the disk is the first level below
    (kv_cache_manager_v2.py id 56023105518). Where `host_cache_size` is None, V2 would take a part of the
    machine's memory for the host's level; here it has none then.
    """
    sizes = [config.host_cache_size if getattr(config, "onboard_blocks", True) else 0]
    if is_v2:
        sizes.append(getattr(config, "disk_cache_size", None))
    block_bytes = config.tokens_per_block * profile.kv_bytes_per_token
    blocks = [(size or 0) // block_bytes for size in sizes]
    return [n_blocks for n_blocks in blocks if n_blocks]


def attention_windows(args: TorchLlmArgs, max_seq_len: int) -> tuple[int, ...]:
    """The distinct attention windows in tokens, in the order of the layers."""
    windows = args.kv_cache_config.max_attention_window or [max_seq_len]
    return tuple(dict.fromkeys(min(window, max_seq_len) for window in windows))
