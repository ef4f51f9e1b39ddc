"""The TensorRT-LLM double's constructor: names, defaults, strictness, sizes and failures."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import VERSIONS, sim_api
from slagate.workers.sim.args import (
    LACKS,
    DecodingSection11,
    KvCacheConfig,
    SimSettings,
    parse_args,
)
from slagate.workers.sim.build import (
    attention_windows,
    event_hash_algo,
    lower_blocks,
    primary_blocks,
    uses_cache_v2,
)
from slagate.workers.sim.kv_cache.events import KvEventRecorder
from slagate.workers.sim.request import SamplingParams
from support.engine.sim_llm import PROFILE, expected, llm, prompt_of

SETTINGS = SimSettings(profile=PROFILE)
every_version = pytest.mark.parametrize("api", VERSIONS)


def test_defaults_are_tensorrt_llms() -> None:
    args = parse_args("m")
    assert (args.max_batch_size, args.max_num_tokens, args.max_seq_len) == (2048, 8192, None)
    assert (args.max_input_len, args.max_beam_width, args.stream_interval) == (1024, 1, 1)
    assert not args.enable_chunked_prefill
    assert not args.enable_iter_perf_stats
    assert not args.disable_overlap_scheduler
    assert args.cache_transceiver_config is None
    assert args.scheduler_config.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
    cache = args.kv_cache_config
    assert (cache.tokens_per_block, cache.event_buffer_max_size) == (32, 0)
    assert (cache.free_gpu_memory_fraction, cache.enable_block_reuse) == (0.9, True)


@pytest.mark.parametrize("name", ["max_batch_size", "max_num_tokens", "max_beam_width"])
def test_none_means_the_default_for_sizes(name: str) -> None:
    assert getattr(parse_args("m", **{name: None}), name) == getattr(parse_args("m"), name)


@every_version
def test_a12_an_unknown_keyword_names_class_and_key(api: str) -> None:
    with pytest.raises(ValueError, match="TorchLlmArgs has no argument 'max_batchsize'"):
        sim_api(api).LLM("m", sim=SETTINGS, max_batchsize=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_cache_config": {"tokens_per_blok": 32}}, "tokens_per_blok"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "free_gpu_memory_fraction"),
        ({"kv_cache_config": {"max_attention_window": []}}, "max_attention_window"),
        ({"cache_transceiver_config": {"backend": "nixl"}}, "backend"),
        ({"scheduler_config": {"policy": "x"}}, "policy"),
        ({"backend": "tensorrt"}, "backend"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"stream_interval": 0}, "stream_interval"),
    ],
)
def test_a12_a_bad_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_args("m", **arguments)


@pytest.mark.parametrize(
    ("version", "arguments", "named"),
    [
        ("1.1", {"otlp_traces_endpoint": "http://127.0.0.1"}, "otlp_traces_endpoint"),
        ("1.2", {"max_stats_len": 7}, "max_stats_len"),
        ("1.2", {"kv_cache_config": {"use_kv_cache_manager_v2": True}}, "use_kv_cache_manager_v2"),
        ("1.2", {"cache_transceiver_config": {"backend": "MOONCAKE"}}, "backend=MOONCAKE"),
        ("1.2", {"moe_config": {"backend": "AUTO"}}, "moe_config.backend=AUTO"),
        ("1.3rc", {"kv_cache_config": {"use_kv_cache_manager_v2": "auto"}}, "manager_v2=auto"),
        ("1.4rc", {"enable_sleep": True}, "enable_sleep"),
        ("1.4rc", {"kv_cache_config": {"onboard_blocks": True}}, "onboard_blocks"),
        ("1.4rc", {"kv_cache_config": KvCacheConfig(onboard_blocks=True)}, "onboard_blocks"),
    ],
)
def test_w08_an_argument_that_a_version_does_not_have_is_refused(
    version: str, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"TorchLlmArgs has no argument '.*{named}'"):
        parse_args("m", lacks=LACKS[version], **arguments)
    assert parse_args("m", lacks=frozenset(), **arguments)


@every_version
def test_w08_what_a_version_does_not_have_its_arguments_do_not_have_either(api: str) -> None:
    args = sim_api(api).LLM("m", sim=SETTINGS).args
    cache = args.kv_cache_config
    assert hasattr(args, "max_stats_len") == (api in ("1.3rc", "1.4rc"))
    assert hasattr(cache, "use_kv_cache_manager_v2") == (api in ("1.3rc", "1.4rc"))
    assert hasattr(cache, "onboard_blocks") == (api != "1.4rc")


@every_version
def test_w08_drafting_is_configured_by_a_dict_since_the_candidates_of_1_3(api: str) -> None:
    eagle = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "draft"}
    if api in ("1.1", "1.2"):
        with pytest.raises(AttributeError, match="'decoding_type' is a ClassVar"):
            sim_api(api).LLM("m", sim=SETTINGS, speculative_config=eagle)
        with pytest.raises(ValueError, match="Invalid decoding type: Eagle3"):
            DecodingSection11.from_dict(eagle)
        older = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "draft"}
        section = DecodingSection11.from_dict(older)
        assert "decoding_type" not in older
        args = sim_api(api).LLM("m", sim=SETTINGS, speculative_config=section).args
        assert args.speculative_config.speculative_model_dir == "draft"
        return
    args = sim_api(api).LLM("m", sim=SETTINGS, speculative_config=eagle).args
    assert args.speculative_config.speculative_model == "draft"
    for wrong in ({"max_draft_len": 0}, {"speculative_model": None}, {"colour": "red"}):
        with pytest.raises(ValueError, match=f"speculative_config.{next(iter(wrong))}"):
            sim_api(api).LLM("m", sim=SETTINGS, speculative_config=eagle | wrong)


@pytest.mark.parametrize(
    "setting",
    [
        {"kv_block_bytes": 17},
        {"time_scale": -1.0},
        {"vocab_size": 0},
        {"transfer_bytes_per_s": 0.0},
        {"init_s": 1.0},
    ],
)
def test_a_bad_setting_is_named(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        llm(**setting)


def test_a_nested_config_may_be_a_model() -> None:
    config = KvCacheConfig(tokens_per_block=16, max_tokens=160)
    engine = sim_api().LLM("m", sim=SETTINGS, kv_cache_config=config)
    assert engine.args.kv_cache_config.tokens_per_block == 16
    assert engine.get_kv_cache_capacity()["maxNumBlocks"] == 10  # type: ignore[attr-defined]


@every_version
def test_a12_a_world_larger_than_the_node_is_a_runtime_error(api: str) -> None:
    settings = SimSettings(profile=PROFILE, n_gpus=4)
    llm_type = sim_api(api).LLM
    llm_type("m", sim=settings, tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(RuntimeError, match="8 GPUs are needed, this node has 4"):
        llm_type("m", sim=settings, tensor_parallel_size=4, pipeline_parallel_size=2)


@every_version
def test_a12_a_slow_and_failing_start(api: str) -> None:
    """The time passes before the failure, and wrong arguments cost no time."""
    waited: list[float] = []
    settings = SimSettings(
        profile=PROFILE, init_s=90.0, pause=waited.append, fail_init=OSError("no weights")
    )
    with pytest.raises(ValueError, match="no argument"):
        sim_api(api).LLM("m", sim=settings, nonsense=1)
    assert waited == []
    with pytest.raises(OSError, match="no weights"):
        sim_api(api).LLM("m", sim=settings)
    assert waited == [90.0]


def test_a_transceiver_needs_a_transport() -> None:
    with pytest.raises(ValueError, match="transport"):
        llm(cache_transceiver_config={"backend": "DEFAULT"})


@pytest.mark.parametrize(
    ("config", "n_tokens"),
    [
        ({}, PROFILE.kv_capacity_tokens),
        ({"free_gpu_memory_fraction": 0.45}, PROFILE.kv_capacity_tokens // 2),
        ({"max_tokens": 640}, 640),
        ({"max_tokens": 10**9}, PROFILE.kv_capacity_tokens),
    ],
)
def test_kv_capacity_is_the_profiles_share_of_memory_cut_by_max_tokens(
    config: dict[str, Any], n_tokens: int
) -> None:
    assert primary_blocks(PROFILE, KvCacheConfig(**config)) == n_tokens // 32


def test_a_kv_cache_of_less_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_config"):
        llm(kv_cache_config={"max_tokens": 31})


def test_lower_levels_have_the_true_size_of_a_block(tmp_path: Path) -> None:
    block_bytes = 32 * PROFILE.kv_bytes_per_token

    def blocks(*, is_v2: bool = True, **config: Any) -> list[int]:
        return lower_blocks(PROFILE, KvCacheConfig(**config), is_v2=is_v2)

    assert blocks() == []
    assert blocks(host_cache_size=block_bytes * 3 - 1) == [2]
    host = {"host_cache_size": block_bytes * 3}
    disk = {"disk_cache_size": block_bytes * 9, "disk_cache_path": str(tmp_path)}
    assert blocks(**host) == [3]
    assert blocks(**host, **disk) == [3, 9]
    assert blocks(**disk) == [9]
    assert blocks(**host, **disk, is_v2=False) == [3]


@pytest.mark.parametrize("path", [None, "/nowhere/at/all"])
def test_t2_6_a_disk_tier_needs_a_folder(path: str | None) -> None:
    with pytest.raises(ValueError, match="disk_cache_path"):
        llm(kv_cache_config={"disk_cache_size": 1 << 30, "disk_cache_path": path})


def test_w11_the_newest_leaves_the_cache_manager_to_the_model_and_does_not_tell() -> None:
    """What "auto" comes to is known in the engine's process only."""
    for version, said in (("1.3rc", (False, None)), ("1.4rc", ("auto", "auto"))):
        transceiver = {"backend": "NIXL"}
        args = parse_args("m", lacks=LACKS[version], cache_transceiver_config=transceiver)
        assert args.cache_transceiver_config is not None
        runtime = args.cache_transceiver_config.transceiver_runtime
        assert (args.kv_cache_config.use_kv_cache_manager_v2, runtime) == said
    for name in ("kv_cache_event_hash_algo", "disk_cache_size"):
        with pytest.raises(ValueError, match=name):
            llm(api="1.3rc", kv_cache_config={name: None})


NIXL = {"backend": "NIXL", "transceiver_runtime": "PYTHON"}


@pytest.mark.parametrize(
    ("setting", "transceiver", "is_v2"),
    [
        ("auto", None, True),
        ("auto", {"backend": None}, True),
        ("auto", NIXL, True),
        ("auto", NIXL | {"backend": "DEFAULT"}, True),
        ("auto", {"backend": "NIXL"}, False),
        ("auto", NIXL | {"transceiver_runtime": None}, False),
        ("auto", NIXL | {"backend": "UCX"}, False),
        (False, NIXL, False),
        (True, NIXL, True),
    ],
)
def test_w11_auto_is_the_second_manager_where_handoffs_can_move_its_caches(
    setting: object,
    transceiver: object,
    is_v2: bool,  # noqa: FBT001
) -> None:
    cache = {"use_kv_cache_manager_v2": setting, "kv_cache_event_hash_algo": "v2_sha256"}
    args = parse_args("m", kv_cache_config=cache, cache_transceiver_config=transceiver)
    assert uses_cache_v2(args, SETTINGS) == is_v2
    algorithm = event_hash_algo(args.kv_cache_config, is_v2=is_v2)
    assert algorithm == ("v2_sha256" if is_v2 else "v1_block_key")
    if setting == "auto":
        assert not uses_cache_v2(args, replace(SETTINGS, prefers_cache_v2=False))


@pytest.mark.parametrize("transceiver", [{"backend": "UCX"}, NIXL | {"transceiver_runtime": None}])
def test_w11_the_second_manager_fails_with_a_transceiver_that_moves_only_the_first_ones_caches(
    transceiver: dict[str, Any],
) -> None:
    args = parse_args(
        "m",
        kv_cache_config={"use_kv_cache_manager_v2": True},
        cache_transceiver_config=transceiver,
    )
    with pytest.raises(RuntimeError, match="does not support the V2"):
        uses_cache_v2(args, SETTINGS)


def test_w11_without_a_choice_the_hashes_are_the_first_managers() -> None:
    assert event_hash_algo(KvCacheConfig(), is_v2=True) == "v1_block_key"
    early = parse_args("m", lacks=LACKS["1.3rc"]).kv_cache_config
    assert event_hash_algo(early, is_v2=True) == "v1_block_key"


def test_attention_windows_are_distinct_and_inside_the_sequence() -> None:
    args = parse_args("m", kv_cache_config={"max_attention_window": [512, 4096, 512, 9999]})
    assert attention_windows(args, 4096) == (512, 4096)
    assert attention_windows(parse_args("m"), 4096) == (4096,)


def test_w01_the_context_window_stays_unset_unless_it_was_given() -> None:
    engine = llm(model_max_seq_len=4096)
    assert engine.args.max_seq_len is None
    assert engine._hf_model_config.max_position_embeddings == 4096
    assert llm(model_max_seq_len=4096, max_seq_len=100).args.max_seq_len == 100


def test_each_attention_dp_rank_has_a_cache_of_its_own() -> None:
    cache = {"event_buffer_max_size": 8}
    engine = llm(kv_cache_config=cache, tensor_parallel_size=2, enable_attention_dp=True)
    assert engine.resident() == [{}, {}]
    assert llm(kv_cache_config=cache, tensor_parallel_size=2).resident() == [{}]


def test_resident_blocks_are_named_as_events_name_them() -> None:
    """`instance_salt` decides the names, so equal engines agree and others do not."""

    async def names(**changed: Any) -> set[int]:
        engine = llm(kv_cache_config={"event_buffer_max_size": 100}, **changed)
        await engine.generate_async(prompt_of(65), SamplingParams(max_tokens=1))
        return {*engine.resident()[0]}

    async def scenario() -> None:
        assert len(await names()) == 2
        assert await names() == await names()
        assert not await names() & await names(instance_salt=b"other")

    run(scenario)


def test_generate_runs_a_prompt_or_a_list_of_them() -> None:
    engine = llm(time_scale=0.0)
    sampling = [SamplingParams(max_tokens=n) for n in (2, 3)]
    results = engine.generate([prompt_of(8), prompt_of(9)], sampling)
    assert [one.outputs[0].token_ids for one in results] == [
        expected(prompt_of(8), 2),
        expected(prompt_of(9), 3),
    ]
    one = engine.generate(prompt_of(8), SamplingParams(max_tokens=1), streaming=False)
    assert one.finished
    with pytest.raises(ValueError, match="empty"):
        engine.generate([])


def test_generate_does_not_block_a_running_loop() -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="generate_async"):
            llm().generate([1])

    run(scenario)


def test_an_engine_cannot_be_pickled() -> None:
    with pytest.raises(RuntimeError, match="pickled"):
        pickle.dumps(llm())


def test_recorders_exist_only_with_an_event_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []
    plain_init = KvEventRecorder.__init__

    def init(self: KvEventRecorder, *args: Any, rank: int | None, **kwargs: Any) -> None:
        made.append(rank)
        plain_init(self, *args, rank=rank, **kwargs)

    monkeypatch.setattr(KvEventRecorder, "__init__", init)
    llm()
    assert made == []
    cache = {"event_buffer_max_size": 8}
    llm(kv_cache_config=cache)
    assert made == [None]
    engine = llm(kv_cache_config=cache, tensor_parallel_size=2, enable_attention_dp=True)
    assert made == [None, 0, 1]
    # One buffer takes the events of both.
    assert engine._engine.events.max_events == 16
