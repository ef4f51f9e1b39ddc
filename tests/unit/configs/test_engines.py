"""The packaged engine configurations: each is clean for its role, alone and with the role it pairs with."""

from pathlib import Path

import pytest

from slagate.workers.engine_args.build import EngineArgs, build_engine_args, check_pair
from slagate.workers.engine_args.yaml_text import engine_configs
from slagate.workers.sim.args import parse_args

ROLES = ("agg", "prefill", "decode", "encode")
PAIRS = [
    (name, name.removesuffix("prefill") + "decode")
    for name in engine_configs()
    if name.endswith("prefill")
]


def role_of(name: str) -> str:
    (role,) = [role for role in ROLES if name.endswith(role)]
    return role


def built(name: str) -> EngineArgs:
    return build_engine_args(role=role_of(name), cli={}, extra=Path(name), override=None, forced={})


def test_the_configurations_there_are() -> None:
    assert engine_configs() == [
        "deepseek-r1/agg",
        "deepseek-r1/decode",
        "deepseek-r1/prefill",
        "deepseek-r1/wide-ep-decode",
        "deepseek-r1/wide-ep-prefill",
        "gemma3/agg",
        "gemma3/decode",
        "gemma3/prefill",
        "gpt-oss-120b/decode",
        "gpt-oss-120b/prefill",
        "llama4-eagle/agg",
        "llama4-eagle/decode",
        "llama4-eagle/prefill",
        "llama4-multimodal/decode",
        "llama4-multimodal/encode",
        "llama4-multimodal/prefill",
        "qwen3/agg",
        "qwen3/decode",
        "qwen3/prefill",
    ]


@pytest.mark.parametrize("name", engine_configs())
def test_a_configuration_is_clean_and_the_double_takes_it(name: str) -> None:
    args = built(name)
    assert not args.findings
    parse_args("model", **args.values)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_two_roles_go_together(prefill: str, decode: str) -> None:
    assert check_pair(built(prefill), built(decode)) == []


def test_all_roles_of_gemma_have_one_window_list() -> None:
    windows = [
        built(f"gemma3/{role}").values["kv_cache_config"]["max_attention_window"]
        for role in ("agg", "prefill", "decode")
    ]
    assert windows == [[512, 512, 512, 512, 512, 32768]] * 3
