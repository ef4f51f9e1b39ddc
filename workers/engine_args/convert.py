"""Converts engine arguments of one role to another role, or to another tensor-parallel size.

It follows Dynamo's profiler: decode becomes aggregated with block reuse on and no transceiver, prefill with
block reuse off and overlap scheduling on. Arguments that the profiler leaves alone are adapted where the
engine would not start or would refuse prompts: tokens a step, expert parallelism, slots of experts. The way
back takes from the other role what the two must have alike.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from slagate.workers.engine_args.check import check_values
from slagate.workers.engine_args.model.merge import in_brief, parts, plain
from slagate.workers.engine_args.model.model import EngineModel
from slagate.workers.engine_args.yaml_text import EXTRA, PEER
from slagate.workers.runtime.usage import UsageError

TRANSCEIVER = "cache_transceiver_config"
REUSE = "kv_cache_config.enable_block_reuse"
EVENTS = "kv_cache_config.event_buffer_max_size"
OVERLAP = "disable_overlap_scheduler"
CHUNKED = "enable_chunked_prefill"

MAX_STEP_TOKENS = 8192
"""The most tokens a step of an aggregated worker: TensorRT-LLM's default. Longer prompts go in pieces."""


ABSENT: Any = object()
"""Stands for a key that is not there; None is a value."""


class ArgumentChange(NamedTuple):
    """A dotted key whose value the conversion changed, and why; `ABSENT` for no value."""

    key: str
    old: Any
    new: Any
    why: str

    def __str__(self) -> str:
        if self.new is ABSENT:
            return f"- {self.key}: {in_brief(self.old)}"
        if self.old is ABSENT:
            return f"+ {self.key}: {in_brief(self.new)}"
        return f"~ {self.key}: {in_brief(self.old)} -> {in_brief(self.new)}"


class Conversion:
    """Values in conversion, and the changes made to them, in order."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """`values` are nested dicts, which are copied."""
        self.values = plain(values)
        self.changes: list[ArgumentChange] = []
        self.doubts: list[str] = []
        """Doubts about the result that no rule can check, in words."""

    @property
    def model(self) -> EngineModel:
        """The current values, as rules read them."""
        return EngineModel(plain(self.values))

    def put(self, key: str, *, new: Any, why: str) -> None:
        """Set a dotted key, or remove it with `ABSENT`, and note the change, if it is one."""
        old = dict(parts(self.values)).get(key, ABSENT)
        if type(old) is type(new) and old == new:
            return
        into = self.values
        *sections, last = key.split(".")
        for section in sections:
            into[section] = into.get(section) or {}
            into = into[section]
        if new is ABSENT:
            del into[last]
        else:
            into[last] = plain(new)
        self.changes.append(ArgumentChange(key, old, new, why))


def convert(
    values: Mapping[str, Any],
    *,
    role: str,
    to: str | None,
    tp: int | None,
    peer: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert `values` of `role` to the role `to`, to a tensor-parallel size, or to both.

    `peer` are the arguments of the role that the result is to pair with. Raises `UsageError` for invalid
    values, and between prefill and decode, which become each other by way of agg only.
    """
    for finding in check_values(values, allow_unknown=True):
        if finding.is_error:
            raise UsageError(f"{EXTRA}: {finding}")
    conversion = Conversion(values)
    if to is not None and to != role:
        if "agg" not in (role, to):
            raise UsageError(f"--to: from {role} to {to} there is no way but by agg")
        if to == "agg":
            _to_agg(conversion, role)
        elif peer is None:
            raise UsageError(f"{PEER}: {to} needs those of the role it pairs with")
        else:
            _from_agg(conversion, to, peer)
    if tp is not None:
        _resize(conversion, tp)
    return conversion


def _to_agg(conversion: Conversion, role: str) -> None:
    put = conversion.put
    put(TRANSCEIVER, new=ABSENT, why="an aggregated worker hands nothing over")
    if role == "prefill":
        why = "what is measured is the whole prompt, not what is cached of it"
        put(REUSE, new=False, why=why)
        why = "only context-only requests are refused with overlap scheduling"
        put(OVERLAP, new=ABSENT, why=why)
        return
    model = conversion.model
    why = "it processes prompts, whose beginnings repeat"
    if not model.kv_cache_config.enable_block_reuse:
        why += "; it was off: set it back to false with Eagle, or where prompts hold images"
    put(REUSE, new=True, why=why)
    if model.kv_cache_config.event_buffer_max_size == 0:
        put(EVENTS, new=ABSENT, why="prefix routing finds what is cached by its events")
    longest = model.max_seq_len or MAX_STEP_TOKENS
    step = model.up_to_blocks(min(longest, MAX_STEP_TOKENS))
    if model.max_num_tokens < step:
        why = "a step holds prompts, no longer only a token of each"
        put("max_num_tokens", new=step, why=why)
    if longest > max(model.max_num_tokens, step) and not model.enable_chunked_prefill:
        put(CHUNKED, new=True, why="prompts beyond max_num_tokens would be refused")


def _from_agg(conversion: Conversion, to: str, peer: Mapping[str, Any]) -> None:
    """Become the role `to`; what both roles of a pairing must have alike is as the other one has it."""
    put = conversion.put
    if not isinstance(peer.get(TRANSCEIVER), dict):
        raise UsageError(f"{PEER}: has no {TRANSCEIVER} to go by")
    put(TRANSCEIVER, new=peer[TRANSCEIVER], why="as the other role has it: both move one KV cache")
    theirs = dict(parts(peer))
    for key in (REUSE, EVENTS):
        put(key, new=theirs.get(key, ABSENT), why="as the other role has it")
    if to == "prefill":
        why = "TensorRT-LLM before 1.3 refuses context-only requests without it"
        put(OVERLAP, new=True, why=why)
        return
    put(CHUNKED, new=ABSENT, why="no prompts are processed here")
    model = conversion.model
    step = model.up_to_blocks(model.max_batch_size * model.step_tokens_of_a_request)
    if step < model.max_num_tokens:
        why = "a step has one token of each request, and its drafts: the batch"
        put("max_num_tokens", new=step, why=why)


def _resize(conversion: Conversion, tp: int) -> None:
    put, old = conversion.put, conversion.model
    put("tensor_parallel_size", new=tp, why="asked for")
    if tp & (tp - 1):
        conversion.doubts.append(
            f"--tp {tp} is no power of two: the heads of few models divide by it"
        )
    ep = ranks = old.moe_expert_parallel_size or 0
    if ep > 0:
        if tp % ep:
            conversion.doubts.append(
                f"--tp {tp} is no multiple of moe_expert_parallel_size, {ep}: see whether the model's "
                "experts divide by the new one"
            )
        was_all = ep == old.tensor_parallel_size
        ranks = tp if was_all else math.gcd(ep, tp)
        why = "as many as GPUs, as before" if was_all else "a divisor of tensor_parallel_size"
        put("moe_expert_parallel_size", new=ranks, why=why)
    if old.moe_tensor_parallel_size is not None:
        put("moe_tensor_parallel_size", new=ABSENT, why="follows from the other two")
    slots = getattr(old.moe_config.load_balancer, "num_slots", None) or 0
    if ranks > 0 and slots % ranks:
        new = math.ceil(slots / ranks) * ranks
        put("moe_config.load_balancer.num_slots", new=new, why="as many on each of the ranks")
    if tp == 1 and old.enable_attention_dp:
        put("enable_attention_dp", new=ABSENT, why="one rank has everything")
