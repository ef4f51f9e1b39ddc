"""The ranges of a request's sampling and stopping options, whichever engine gets it.

The gateway and every worker check them: an engine may die of a value that it does not check itself, with
all its requests.
"""

import math
from collections.abc import Callable, Mapping
from ctypes import c_float
from types import MappingProxyType
from typing import NamedTuple

from slagate.proto import openengine_pb2 as oe

MAX_STOP_CONDITIONS = 64
"""The limit of TensorRT-LLM's own OpenEngine server."""


class SamplingFault(NamedTuple):
    """A field whose value is wrong, and why it is."""

    field: str
    reason: str


class _Rule(NamedTuple):
    holds: Callable[[float], bool]
    words: str


_FINITE = _Rule(math.isfinite, "must be a finite number of 32 bits")

_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "temperature": _Rule(lambda value: value >= 0, "must not be negative"),
        "top_p": _Rule(lambda value: 0 < value <= 1, "must be over 0 and at most 1"),
        # -1 is how others say "off"; TensorRT-LLM says 0.
        "top_k": _Rule(lambda value: value >= -1, "must be at least -1"),
        "min_p": _Rule(lambda value: 0 <= value <= 1, "must be from 0 to 1"),
        "repetition_penalty": _Rule(lambda value: value > 0, "must be over 0"),
        "frequency_penalty": _FINITE,
        "presence_penalty": _FINITE,
    }
)


def sampling_fault(sampling: oe.SamplingParams) -> SamplingFault | None:
    """The first field that is set to a value out of its range; None if there is none."""
    for descriptor, value in sampling.ListFields():
        rule = _RULES.get(descriptor.name)
        if rule is None:
            continue
        # Engines compute with floats of 32 bits: 1e39 is infinity there, and 1e-50 is 0.
        narrow = c_float(value).value
        for one in (_FINITE, rule):
            if not (one.holds(value) and one.holds(narrow)):
                return SamplingFault(f"sampling.{descriptor.name}", one.words)
    return None


def stopping_fault(stopping: oe.StoppingOptions) -> SamplingFault | None:
    """The fault of more than `MAX_STOP_CONDITIONS` stop conditions; None if there are fewer."""
    if len(stopping.conditions) > MAX_STOP_CONDITIONS:
        return SamplingFault("stopping.conditions", f"more than {MAX_STOP_CONDITIONS} are given")
    return None
