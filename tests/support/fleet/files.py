"""Small fleet files to start a test from, as fresh dicts that the test may change."""

from typing import Any


def disagg_file() -> dict[str, Any]:
    """Two prefill pools and two decode pools, two by two cells each, under the short names."""
    return {
        "mode": "disagg",
        "enable_priority_retry": True,
        "num_prefill_pools": 2,
        "prefill_pools": ["p-fast", "p-bulk"],
        "prefill_pool_priorities": [0, 1],
        "num_decode_pools": 2,
        "decode_pools": ["d-fast", "d-bulk"],
        "prefill_pool_selection_strategy": {
            "isl_min": 0,
            "isl_max": 8000,
            "isl_resolution": 2,
            "ttft_min_ms": 100,
            "ttft_max_ms": 900,
            "ttft_resolution": 2,
            "prefill_pool_mapping": [[0, 1], [0, 1]],
        },
        "decode_pool_selection_strategy": {
            "context_length_min": 0,
            "context_length_max": 16000,
            "context_length_resolution": 2,
            "itl_min_ms": 5,
            "itl_max_ms": 45,
            "itl_resolution": 2,
            "decode_pool_mapping": [[0, 1], [0, 1]],
        },
    }


def agg_file() -> dict[str, Any]:
    """Three pools for both phases in a grid of three axes, isl 2 by ttft 3 by itl 2 cells."""
    return {
        "mode": "agg",
        "num_agg_pools": 3,
        "agg_pools": ["a-fast", "a-mid", "a-bulk"],
        "agg_pool_selection_strategy": {
            "isl_min": 0,
            "isl_max": 4000,
            "isl_resolution": 2,
            "ttft_min_ms": 0,
            "ttft_max_ms": 300,
            "ttft_resolution": 3,
            "itl_min_ms": 0,
            "itl_max_ms": 40,
            "itl_resolution": 2,
            "agg_pool_mapping": [[[0, 1], [1, 1], [1, 2]], [[0, 0], [0, 1], [1, 2]]],
        },
    }
