"""The shipped configurations of Dynamo's global router: they load, and say what Dynamo's own code says."""

import json
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.fleet_file.load import load_config
from support.fleet.dynamo_router import Answer, Router, write


def disagg(n_prefill: int, n_decode: int, unit: str, **more: Any) -> dict[str, Any]:
    """Two bands on each axis; the tighter half of the targets goes to pool 0 where there are two."""
    tables = {1: [[0, 0], [0, 0]], 2: [[0, 1], [0, 1]]}
    return {
        "num_prefill_pools": n_prefill,
        "num_decode_pools": n_decode,
        "prefill_pool_dynamo_namespaces": [f"prefill-{at}" for at in range(n_prefill)],
        "decode_pool_dynamo_namespaces": [f"decode-{at}" for at in range(n_decode)],
        "prefill_pool_selection_strategy": {
            f"ttft_min{unit}": 10,
            f"ttft_max{unit}": more.get("ttft_max", 3000),
            "ttft_resolution": 2,
            "isl_min": 0,
            "isl_max": 32000,
            "isl_resolution": 2,
            "prefill_pool_mapping": tables[n_prefill],
        },
        "decode_pool_selection_strategy": {
            f"itl_min{unit}": 10,
            f"itl_max{unit}": more.get("itl_max", 500),
            "itl_resolution": 2,
            "context_length_min": 0,
            "context_length_max": 32000,
            "context_length_resolution": 2,
            "decode_pool_mapping": tables[n_decode],
        },
    }


AGG = {
    "mode": "agg",
    "num_agg_pools": 2,
    "agg_pool_dynamo_namespaces": ["agg-0", "agg-1"],
    "agg_pool_selection_strategy": {
        "ttft_min_ms": 0,
        "ttft_max_ms": 1000,
        "ttft_resolution": 2,
        "itl_min_ms": 0,
        "itl_max_ms": 1000,
        "itl_resolution": 1,
        "agg_pool_mapping": [[0], [1]],
    },
}
EXAMPLES = {
    "2 prefill, 1 decode, first release": disagg(2, 1, "", ttft_max=1000, itl_max=100),
    "2 prefill, 2 decode": disagg(2, 2, "_ms"),
    "TP 1 and TP 2 prefill, 1 decode": disagg(2, 1, "_ms"),
    "2 agg": AGG,
}
# By stage: size, target in ms (the TTFT one for agg), pool.
EXPECTED = {
    "2 prefill, 1 decode, first release": {
        "prefill": [(8000, 504, 0), (8000, 505, 1), (30000, 100, 0), (8000, None, 1)],
        "decode": [(8000, 10, 0), (30000, None, 0)],
    },
    "2 prefill, 2 decode": {
        "prefill": [(8000, 1504, 0), (8000, 1505, 1), (50000, 1, 0), (1, None, 1)],
        "decode": [(8000, 254.9, 0), (8000, 255, 1), (50000, None, 1)],
    },
    "TP 1 and TP 2 prefill, 1 decode": {
        "prefill": [(8000, 1504, 0), (8000, 9999, 1), (1, None, 1)],
        "decode": [(8000, 5, 0), (8000, 900, 0)],
    },
    "2 agg": {"agg": [(8000, 499.9, 0), (8000, 500, 1), (None, None, 1), (8000, 0, 0)]},
}
N_OLD_KEYS = {"2 prefill, 1 decode, first release": 4}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_shipped_configuration_gives_dynamos_answers(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "file.json", EXAMPLES[name])
    ours, dynamo = load_config(path), Router(path)
    assert len([warning for warning in ours.warnings if "deprecated" in warning]) == N_OLD_KEYS.get(
        name, 0
    )
    for stage, expected in EXPECTED[name].items():
        grid = ours.stages[stage]
        for size, target_ms, pool in expected:
            request = {
                "isl": size,
                "context_length": size,
                "ttft_ms": target_ms,
                "itl_ms": target_ms,
            }
            cell = grid.select(request)
            assert cell.pool == pool, (stage, size, target_ms)
            wanted = dynamo.select(stage, request)
            assert Answer(cell.pool, grid.pool_order(cell)) == wanted
    assert json.loads(ours.text) == EXAMPLES[name]
