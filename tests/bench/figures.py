"""Medians and spreads."""

import statistics
from collections.abc import Sequence
from typing import Any


def figures(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Median and 10th to 90th percentile, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=10)
    return {
        f"{name}_ms": round(statistics.median(seconds) * 1000, 3),
        f"{name}_p10_p90_ms": [round(cuts[0] * 1000, 3), round(cuts[-1] * 1000, 3)],
    }


def ratio(measured: Sequence[float], reference: Sequence[float]) -> float:
    """Of the medians."""
    return round(statistics.median(measured) / statistics.median(reference), 3)
