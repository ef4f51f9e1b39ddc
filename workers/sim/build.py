"""The simulated engine that constructor arguments and settings ask for."""

import math
from typing import NamedTuple

from slagate.workers.sim.args import TorchLlmArgs
from slagate.workers.sim.engine import SimEngine
from slagate.workers.sim.handoff import DisaggIds
from slagate.workers.sim.kv_cache.cache import SimKvCache
from slagate.workers.sim.kv_cache.events import KvEventQueue, KvEventRecorder
from slagate.workers.sim.rank import SimRank
from slagate.workers.sim.request import ApiTraits
from slagate.workers.sim.sequence import EngineLimits
from slagate.workers.sim.settings import SimSettings, attention_windows, host_blocks, primary_blocks
from slagate.workers.sim.stats import StatsLimits, StatsQueue
from slagate.workers.sim.timing import EngineTiming


class EngineParts(NamedTuple):
    """An engine, and what is read from beside it. The ranks are the engine's."""

    engine: SimEngine
    ranks: list[SimRank]
    stats: StatsQueue
    events: KvEventQueue


def build_engine(
    args: TorchLlmArgs, settings: SimSettings, *, traits: ApiTraits, max_seq_len: int
) -> EngineParts:
    """Raises `ValueError` naming what does not fit together."""
    config, transceiver = args.kv_cache_config, args.cache_transceiver_config
    if args.has_transceiver and settings.transport is None:
        raise ValueError("cache_transceiver_config needs a transport in the settings")
    n_blocks = primary_blocks(settings.profile, config)
    n_ranks, block_tokens = args.attention_dp_size, config.tokens_per_block
    limits = EngineLimits(
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        block_tokens=block_tokens,
        vocab_size=settings.vocab_size,
        kv_block_bytes=settings.kv_block_bytes,
        chunked_prefill=args.enable_chunked_prefill,
        max_tokens_in_buffer=None if transceiver is None else transceiver.max_tokens_in_buffer,
    )
    # With attention DP one buffer takes the events of all ranks, and is as many times as large.
    events = KvEventQueue(config.event_buffer_max_size * n_ranks)
    ranks = []
    for rank in range(n_ranks):
        recorder = None
        if events.max_events:
            recorder = KvEventRecorder(
                events,
                rank=rank if n_ranks > 1 else None,
                windows=attention_windows(args, max_seq_len),
                block_tokens=block_tokens,
                salt=settings.instance_salt,
                newest=traits.newest_events,
            )
        cache = SimKvCache(
            n_blocks,
            block_tokens,
            host_blocks=host_blocks(settings.profile, config) if config.onboard_blocks else 0,
            reuse=config.enable_block_reuse,
            partial_reuse=config.enable_partial_reuse,
            recorder=recorder,
        )
        ranks.append(SimRank(rank, cache, limits, recorder=recorder))
    stats_limits = StatsLimits(
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        total_blocks=n_blocks,
        block_tokens=block_tokens,
        newest=traits.counts_kv_tokens,
    )
    # As many iterations as that, each with a row a rank.
    max_records = args.max_stats_len * n_ranks
    stats = StatsQueue(stats_limits, max_records=max_records)
    # Without a limit TensorRT-LLM keeps a handoff until it is fetched.
    timeout_s = math.inf
    if transceiver is not None and transceiver.kv_transfer_timeout_ms is not None:
        timeout_s = transceiver.kv_transfer_timeout_ms / 1000
    engine = SimEngine(
        limits,
        timing=EngineTiming(
            settings.profile,
            time_scale=settings.time_scale,
            transfer_bytes_per_s=settings.transfer_bytes_per_s,
            host_link_bytes_per_s=settings.host_link_bytes_per_s,
        ),
        ranks=ranks,
        transport=settings.transport if args.has_transceiver else None,
        handoff_timeout_s=timeout_s,
        disagg_ids=DisaggIds(settings.node_id, settings.process_id),
        stats=stats,
    )
    if not args.enable_iter_perf_stats:
        # The engine counts either way; nobody gets to see it.
        stats = StatsQueue(stats_limits, max_records=max_records)
    return EngineParts(engine, ranks, stats, events)
