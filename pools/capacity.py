"""What a worker can hold and run, as it says of itself."""

from typing import NamedTuple

from slagate.pools.table import UNLIMITED
from slagate.proto import openengine_pb2 as oe


class Capacity(NamedTuple):
    """Before a worker has said anything: one rank, and no limit."""

    block_tokens: int = 0  # of one KV block; 0 while that is not known
    n_ranks: int = 1  # attention-DP ranks, each with a KV cache of its own
    n_rows: int = 1  # as many as ranks where one can be asked for
    row_tokens: int = UNLIMITED  # KV cache of a row
    running: int = 0  # requests that its engine runs at once; 0 while that is not known


def capacity_of(info: oe.ServerInfo, *, decodes: bool) -> Capacity:
    """What follows from `info`; whether a rank can be asked for also depends on whether it `decodes`."""
    said = info.capacity
    n_ranks = max(1, info.parallelism.data_parallel_size)
    key = "slagate_supports_decode_dp_rank" if decodes else "trtllm_supports_dp_rank_targeting"
    takes_rank = key in info.extra.fields and info.extra.fields[key].bool_value
    n_rows = n_ranks if takes_rank else 1
    row_tokens = UNLIMITED
    if said.total_kv_blocks:
        row_tokens = said.total_kv_blocks // n_rows * max(1, said.kv_block_size)
    running = said.max_running_requests * n_ranks
    return Capacity(said.kv_block_size, n_ranks, n_rows, row_tokens, running)
