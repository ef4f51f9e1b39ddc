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
from slagate.workers.engine_args.model.merge import in_brief, plain
from slagate.workers.engine_args.model.model import EngineModel
from slagate.workers.engine_args.yaml_text import PEER
from slagate.workers.runtime.usage import UsageError

TRANSCEIVER = "cache_transceiver_config"
REUSE = "kv_cache_config.enable_block_reuse"
EVENTS = "kv_cache_config.event_buffer_max_size"
OVERLAP = "disable_overlap_scheduler"
CHUNKED = "enable_chunked_prefill"

WHERE_REUSE_IS_OFF = "set it back to false with Eagle, or where prompts hold images"

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
        """The model of the current values. Raises `UsageError` naming a wrong one."""
        model, findings = check_values(self.values, allow_unknown=True)
        if model is None:
            raise UsageError(f"--extra-engine-args: {findings[-1]}")
        return model

    def put(self, key: str, new: Any, why: str) -> None:
        """Set a dotted key, or remove it with `ABSENT`, and note the change, if it is one."""
        *sections, last = key.split(".")
        into = self.values
        for section in sections:
            if not isinstance(into.get(section), dict):
                if new is ABSENT:
                    return
                into[section] = {}
            into = into[section]
        old = into.get(last, ABSENT)
        if type(old) is type(new) and (old is new or old == new):
            return
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
    conversion = Conversion(values)
    if to is not None and to != role:
        steps = {
            ("decode", "agg"): _decode_to_agg,
            ("prefill", "agg"): _prefill_to_agg,
            ("agg", "decode"): _agg_to_decode,
            ("agg", "prefill"): _agg_to_prefill,
        }
        if (role, to) not in steps:
            raise UsageError(f"--to: from {role} to {to} there is no way but by agg")
        if role == "agg" and peer is None:
            raise UsageError(f"{PEER}: {to} needs those of the role it pairs with")
        steps[role, to](conversion, peer or {})
    if tp is not None:
        _resize(conversion, tp)
    return conversion


def _decode_to_agg(conversion: Conversion, _peer: Mapping[str, Any]) -> None:
    conversion.put(TRANSCEIVER, ABSENT, "an aggregated worker hands nothing over")
    model = conversion.model
    off = "" if model.kv_cache_config.enable_block_reuse else "; it was off: " + WHERE_REUSE_IS_OFF
    conversion.put(REUSE, True, f"it processes prompts, whose beginnings repeat{off}")  # noqa: FBT003
    if model.kv_cache_config.event_buffer_max_size == 0:
        conversion.put(EVENTS, ABSENT, "prefix routing finds what is cached by its events")
    longest = model.max_seq_len or MAX_STEP_TOKENS
    step = model.up_to_blocks(min(longest, MAX_STEP_TOKENS))
    if model.max_num_tokens < step:
        conversion.put(
            "max_num_tokens", step, "a step holds prompts, no longer only a token of each"
        )
    if longest > max(model.max_num_tokens, step) and not model.enable_chunked_prefill:
        conversion.put(CHUNKED, True, "prompts beyond max_num_tokens would be refused")  # noqa: FBT003


def _prefill_to_agg(conversion: Conversion, _peer: Mapping[str, Any]) -> None:
    conversion.put(TRANSCEIVER, ABSENT, "an aggregated worker hands nothing over")
    conversion.put(
        REUSE,
        False,  # noqa: FBT003
        "what is measured is the whole prompt, not what is cached of it",
    )
    conversion.put(
        OVERLAP, ABSENT, "only context-only requests are refused with overlap scheduling"
    )


def _agg_to_decode(conversion: Conversion, peer: Mapping[str, Any]) -> None:
    _as_peer(conversion, peer)
    conversion.put(CHUNKED, ABSENT, "no prompts are processed here")
    model = conversion.model
    step = model.up_to_blocks(model.max_batch_size * model.step_tokens_of_a_request)
    if step < model.max_num_tokens:
        conversion.put(
            "max_num_tokens",
            step,
            "a step has one token of each request, and its drafts: the batch",
        )


def _agg_to_prefill(conversion: Conversion, peer: Mapping[str, Any]) -> None:
    _as_peer(conversion, peer)
    conversion.put(
        OVERLAP,
        True,  # noqa: FBT003
        "TensorRT-LLM before 1.3 refuses context-only requests without it",
    )


def _as_peer(conversion: Conversion, peer: Mapping[str, Any]) -> None:
    """Take from the other role what both roles of a pairing must have alike."""
    if not isinstance(peer.get(TRANSCEIVER), dict):
        raise UsageError(f"{PEER}: has no {TRANSCEIVER} to go by")
    conversion.put(
        TRANSCEIVER, peer[TRANSCEIVER], "as the other role has it: both move one KV cache"
    )
    cache = peer.get("kv_cache_config")
    for key in (REUSE, EVENTS):
        name = key.rpartition(".")[2]
        value = cache.get(name, ABSENT) if isinstance(cache, dict) else ABSENT
        conversion.put(key, value, "as the other role has it")


def _resize(conversion: Conversion, tp: int) -> None:
    old = conversion.model
    conversion.put("tensor_parallel_size", tp, "asked for")
    if tp & (tp - 1):
        conversion.doubts.append(
            f"--tp {tp} is no power of two: the heads of few models divide by it"
        )
    ep = old.moe_expert_parallel_size
    if ep is not None and ep > 0:
        if tp % ep:
            conversion.doubts.append(
                f"--tp {tp} is no multiple of moe_expert_parallel_size, {ep}: see whether the model's "
                "experts divide by the new one"
            )
        was_all = ep == old.tensor_parallel_size
        new = tp if was_all else math.gcd(ep, tp)
        why = "as many as GPUs, as before" if was_all else "a divisor of tensor_parallel_size"
        conversion.put("moe_expert_parallel_size", new, why)
    if old.moe_tensor_parallel_size is not None:
        conversion.put("moe_tensor_parallel_size", ABSENT, "follows from the other two")
    balancer = old.moe_config.load_balancer
    slots = balancer.get("num_slots") if isinstance(balancer, dict) else None
    ranks = conversion.model.moe_expert_parallel_size
    if isinstance(slots, int) and ranks is not None and ranks > 0 and slots % ranks:
        conversion.put(
            "moe_config.load_balancer.num_slots",
            math.ceil(slots / ranks) * ranks,
            "as many on each of the ranks",
        )
    if tp == 1 and old.enable_attention_dp:
        conversion.put("enable_attention_dp", ABSENT, "one rank has everything")
