"""The stages of a request that a pool can serve."""

from enum import Enum


class Stage(Enum):
    """What a pool does with a request. The value is the label in metrics and the CLI."""

    __hash__ = object.__hash__  # a member is one object; `Enum` hashes its name, in Python

    PREFILL = "prefill"
    DECODE = "decode"
    AGG = "agg"
