"""Engine arguments: which layer's value counts, where it came from, and what of it is told."""

import json
import logging
import os
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slagate.workers.engine_args import rules
from slagate.workers.engine_args.build import EngineArgs, build_engine_args, check_pair
from slagate.workers.engine_args.check import check_values
from slagate.workers.engine_args.model.facts import known_versions
from slagate.workers.engine_args.model.merge import Layer, leaves, merge, parts
from slagate.workers.engine_args.model.model import EngineModel, Section
from slagate.workers.engine_args.rules.case import EngineCase, IntendedUse
from slagate.workers.engine_args.rules.table import check_rules
from slagate.workers.engine_args.yaml_text import parse_yaml, yaml_lines
from slagate.workers.runtime.usage import UsageError

YAML = """\
tensor_parallel_size: 8
kv_cache_config:
  free_gpu_memory_fraction: 0.75
  dtype: fp8
cuda_graph_config:
  batch_sizes: [1, 2, 4]
  enable_padding: true
max_batch_size: 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(YAML)
    return path


def built(
    *,
    role: str = "agg",
    cli: dict[str, Any] | None = None,
    extra: Path | None = None,
    override: object = None,
    forced: dict[str, Any] | None = None,
    wanted: IntendedUse | None = None,
) -> EngineArgs:
    return build_engine_args(
        role=role,
        cli=cli or {},
        extra=extra,
        override=None if override is None else json.dumps(override),
        forced=forced or {},
        wanted=wanted,
    )


def codes(args: EngineArgs) -> list[str]:
    return [finding.code for finding in args.findings]


def test_each_layer_counts_over_the_ones_before(file: Path) -> None:
    cli = {"tensor_parallel_size": 2, "max_seq_len": 4096, "stream_interval": 5}
    args = built(
        cli=cli,
        extra=file,
        override={"max_seq_len": 8192, "max_batch_size": 3},
        forced={"stream_interval": 1},
    )
    assert args.values["backend"] == "pytorch"
    assert args.values["tensor_parallel_size"] == 8
    assert args.values["max_seq_len"] == 8192
    assert args.values["max_batch_size"] == 3
    assert args.values["stream_interval"] == 1
    assert args.sources["backend"] == "default"
    assert args.sources["tensor_parallel_size"] == f"--extra-engine-args {file}:1"
    assert args.sources["max_seq_len"] == "--override-engine-args"
    assert args.sources["stream_interval"] == "forced"


def test_an_override_of_one_key_of_a_section_keeps_the_others(file: Path) -> None:
    """What Dynamo 1.6.1 loses: it merges into a model, which the override's dict replaces as a whole."""
    cli = {"kv_cache_config": {"free_gpu_memory_fraction": 0.9}}
    override = {"kv_cache_config": {"enable_block_reuse": False}}
    without_file = built(cli=cli, override=override).values["kv_cache_config"]
    assert without_file["free_gpu_memory_fraction"] == 0.9
    assert without_file["enable_block_reuse"] is False
    args = built(cli=cli, extra=file, override=override)
    assert args.values["kv_cache_config"] == {
        "event_buffer_max_size": 100_000,
        "free_gpu_memory_fraction": 0.75,
        "dtype": "fp8",
        "enable_block_reuse": False,
    }
    key = "kv_cache_config"
    assert args.sources[f"{key}.free_gpu_memory_fraction"] == f"--extra-engine-args {file}:3"
    assert args.sources[f"{key}.enable_block_reuse"] == "--override-engine-args"
    assert args.sources[f"{key}.event_buffer_max_size"] == "default"


def test_the_profilers_overrides() -> None:
    """`cache_transceiver_config: null`, and a tensor-parallel size."""
    args = built(
        extra=Path("deepseek-r1/decode"),
        override={
            "cache_transceiver_config": None,
            "kv_cache_config": {"enable_block_reuse": True},
            "tensor_parallel_size": 8,
        },
    )
    assert args.values["cache_transceiver_config"] is None
    assert args.sources["cache_transceiver_config"] == "--override-engine-args"
    assert not [key for key in args.sources if key.startswith("cache_transceiver_config.")]
    assert args.values["kv_cache_config"]["dtype"] == "fp8"
    assert args.values["tensor_parallel_size"] == 8
    assert not args.errors


def test_lists_are_replaced_and_not_merged(file: Path) -> None:
    args = built(extra=file, override={"cuda_graph_config": {"batch_sizes": [8]}})
    assert args.values["cuda_graph_config"]["batch_sizes"] == [8]


def test_a_section_in_the_place_of_a_value_and_back() -> None:
    section = {"cuda_graph_config": {"max_batch_size": 4, "enable_padding": True}}
    merged = merge([Layer("a", section), Layer("b", {"cuda_graph_config": None})])
    assert merged.sources == {"cuda_graph_config": "b"}
    assert [replaced.old_source for replaced in merged.replaced] == ["a"]
    merged = merge([Layer("a", {"cuda_graph_config": None}), Layer("b", section)])
    assert set(merged.sources.values()) == {"b"}


def test_what_is_replaced_is_logged_with_values_and_sources(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "slagate.workers.engine_args.model.merge"):
        built(
            cli={"tensor_parallel_size": 4, "max_batch_size": 4},
            extra=file,
            override={"kv_cache_config": {"dtype": "auto", "event_buffer_max_size": 5}},
        )
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "engine_args.replaced: tensor_parallel_size: 4 (command line) is replaced by 8 "
            f"(--extra-engine-args {file}:1)",
        ),
        (
            "WARNING",
            f'engine_args.replaced: kv_cache_config.dtype: "fp8" (--extra-engine-args {file}:4) '
            'is replaced by "auto" (--override-engine-args)',
        ),
        (
            "INFO",
            "engine_args.replaced: kv_cache_config.event_buffer_max_size: 100000 (default) is "
            "replaced by 5 (--override-engine-args)",
        ),
    ]


def test_engine_01_an_option_that_a_file_replaces_is_a_finding(file: Path) -> None:
    (finding,) = built(cli={"tensor_parallel_size": 4}, extra=file).findings
    assert (finding.code, finding.place) == ("E107", "tensor_parallel_size")
    assert "4 on the command line" in finding.message
    assert f"8 by --extra-engine-args {file}:1" in finding.message
    (finding,) = built(cli={"stream_interval": 4}, forced={"stream_interval": 1}).findings
    assert (finding.code, finding.place) == ("E108", "stream_interval")


def test_engine_02_equal_values_in_two_places_are_no_conflict(file: Path) -> None:
    args = built(cli={"tensor_parallel_size": 8}, extra=file)
    assert not args.findings
    assert args.sources["tensor_parallel_size"] == f"--extra-engine-args {file}:1"


def test_one_and_true_are_not_equal() -> None:
    merged = merge([Layer("a", {"x": 1}), Layer("b", {"x": True})])
    assert merged.values["x"] is True
    assert len(merged.replaced) == 1


def test_what_is_given_is_copied() -> None:
    cli = {"kv_cache_config": {"max_attention_window": [512]}}
    args = built(cli=cli, override={"kv_cache_config": {"dtype": "fp8"}})
    args.values["kv_cache_config"]["max_attention_window"].append(1)
    assert cli == {"kv_cache_config": {"max_attention_window": [512]}}


def test_engine_02_a_build_section_takes_nothing_from_the_top_level() -> None:
    args = built(
        override={
            "max_num_tokens": 4096,
            "build_config": {"max_num_tokens": 8192, "max_seq_len": 64},
        }
    )
    assert args.values["max_num_tokens"] == 4096
    assert args.values["max_seq_len"] == 64
    assert args.sources["max_seq_len"] == "--override-engine-args"
    assert "build_config" not in args.values
    assert codes(args) == ["E106", "E106"]


def test_autodeploy_gets_none_of_what_it_refuses() -> None:
    args = built(
        override={
            "backend": "_autodeploy",
            "tensor_parallel_size": 4,
            "moe_expert_parallel_size": None,
            "max_batch_size": 8,
        }
    )
    assert args.values == {
        "backend": "_autodeploy",
        "enable_iter_perf_stats": True,
        "kv_cache_config": {},
        "max_batch_size": 8,
        "telemetry_config": {"disabled": True},
    }
    assert [finding.place for finding in args.findings] == ["tensor_parallel_size"]


def test_autodeploy_reports_load_unless_its_version_cannot_which_is_told() -> None:
    override = {"backend": "_autodeploy"}
    for version in (None, (1, 3)):
        args = built(override=override, wanted=IntendedUse(engine_version=version))
        assert (args.values["enable_iter_perf_stats"], args.findings) == (True, [])
    args = built(override=override, wanted=IntendedUse(engine_version=(1, 2)))
    assert "enable_iter_perf_stats" not in args.values
    assert codes(args) == ["E803"]


def test_what_is_forced_is_told_where_somebody_wanted_something_else(file: Path) -> None:
    key = "num_postprocess_workers"
    for override, expected in ((None, []), ({key: 0}, []), ({key: 4}, ["E108"])):
        text = None if override is None else json.dumps(override)
        args = build_engine_args(role="agg", cli={}, extra=file, override=text)
        assert (args.values[key], args.sources[key]) == (0, "forced")
        assert codes(args) == expected
    encoder = build_engine_args(role="encode", cli={}, extra=None, override=None)
    assert key not in encoder.values
    assert not encoder.findings


def test_what_may_never_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    fifo, large = tmp_path / "fifo.yaml", tmp_path / "large.yaml"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(UsageError, match=f"--extra-engine-args: {path}: is no regular file"):
            built(extra=path)
    large.write_text("# 30 MB\n" + "a: [1, 2, 3]\n" * 2_300_000)
    with pytest.raises(UsageError, match=r"large\.yaml: has more than 262,144 bytes"):
        built(extra=large)
    large.write_bytes(b"max_batch_size: 8\n#" + b"x" * ((1 << 18) - 19))
    assert built(extra=large).values["max_batch_size"] == 8
    large.write_bytes(b"#" * ((1 << 18) + 1))
    with pytest.raises(UsageError, match="has more than"):
        built(extra=large)


def test_unknown_arguments_go_on_when_they_may() -> None:
    unknown = json.dumps({"brand_new": {"knob": 1}})
    for allow in (False, True):
        args = build_engine_args(
            role="agg",
            cli={},
            extra=None,
            override=unknown,
            forced={},
            wanted=IntendedUse(allows_unknown=allow),
        )
        assert args.values["brand_new"] == {"knob": 1}
        assert [finding.severity for finding in args.findings] == ([] if allow else ["note"])


def test_errors_are_refused_together() -> None:
    args = built(override={"max_batch_size": [4], "tensor_parallel_size": 0})
    with pytest.raises(UsageError, match=r"2 wrong\n.*max_batch_size.*\n.*tensor_parallel_size"):
        args.refuse_errors()
    built(override={"disable_overlap_scheduler": True}).refuse_errors()  # a warning


def test_a_file_that_is_not_there_names_the_option_and_the_packaged_ones() -> None:
    with pytest.raises(UsageError, match=r"--extra-engine-args: qwen3/prefil .*qwen3/prefill"):
        built(extra=Path("qwen3/prefil"))
    with pytest.raises(UsageError, match=r"--extra-engine-args: nowhere\.yaml: No such file"):
        built(extra=Path("nowhere.yaml"))


@pytest.mark.parametrize(
    "text", ["max_batch_size:\t8\n", "model: m\n\ufeff\n", "model: !.!!str m\n"]
)
def test_what_the_engines_own_loader_refuses_is_refused(text: str) -> None:
    """PyYAML's loader in C takes all of these."""
    with pytest.raises(UsageError, match=r"here: line \d: is not YAML"):
        parse_yaml(text, "here")


@pytest.mark.parametrize(
    "value", ['!!int ""', '!!float ""', "!!bool maybe", "!!timestamp now", "!!timestamp []"]
)
def test_a_value_that_is_not_what_its_tag_says_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"here:.* is not YAML: "):
        parse_yaml(f"max_batch_size: {value}\n", "here")


def test_files_that_are_no_text_or_empty(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_bytes(b"model: \xff\n")
    with pytest.raises(UsageError, match="is not UTF-8"):
        built(extra=path)
    path.write_text("# nothing\n")
    assert not built(extra=path).findings
    with pytest.raises(UsageError, match="Is a directory"):
        built(extra=tmp_path)


def test_a_pairing_is_of_one_prefill_and_one_decode() -> None:
    with pytest.raises(UsageError, match="got agg and agg"):
        check_pair(built(), built())


def test_an_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--role must be one of"):
        built(role="both")


def test_engine_09_variables_of_the_engine_count_over_those_of_the_worker() -> None:
    wanted = IntendedUse(environ={"UCX_TLS": "tcp"})
    transceiver = {"backend": "UCX", "max_tokens_in_buffer": 8192}
    args = built(role="decode", override={"cache_transceiver_config": transceiver}, wanted=wanted)
    assert codes(args) == ["E210"]
    cured = {"cache_transceiver_config": transceiver, "env_overrides": {"UCX_TLS": "tcp,cuda"}}
    assert not built(role="decode", override=cured, wanted=wanted).findings


RULES = "".join(
    file.read_text()
    for file in Path(rules.__file__).parent.iterdir()
    if file.suffix in (".py", ".yaml")
)
KNOWN = known_versions()[-1].fields()
READ = {key for key in KNOWN if re.search(rf"\b{key.rpartition('.')[2]}\b", RULES)}
"""What rules may read: arguments whose names they have."""

SECTIONS = {
    "args": "",
    "cache": "kv_cache_config.",
    "transceiver": "cache_transceiver_config.",
    "drafting": "speculative_config.",
}


def is_there(key: str) -> bool:
    """Whether it is an argument, or made of some, or a method of such a text, or what was given."""
    start, _, last = key.rpartition(".")
    if last == "given" or hasattr(str, last):
        return is_there(start)
    return key in KNOWN or hasattr(EngineModel, key)


def test_what_rules_read_is_known_and_every_default_of_it_can_be_had() -> None:
    found = re.findall(r"(?:case\.|{)(args|cache|transceiver|drafting)\.(\w+(?:\.\w+)*)", RULES)
    assert found
    for start, name in found:
        assert is_there(SECTIONS[start] + name), name
    sections: dict[str, Any] = {"speculative_config": {"decoding_type": "MTP"}}
    for key in READ:
        reduce(lambda into, name: into.setdefault(name, {}), key.split(".")[:-1], sections)
    args = EngineModel(sections)
    for key in READ:
        value = reduce(getattr, key.split("."), args)
        if not isinstance(value, Section) and "speculative_config." not in key:
            assert value == KNOWN[key].get("default"), key


_LEAVES = st.none() | st.booleans() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2)
_SECTIONS = st.dictionaries(st.sampled_from("abc"), _LEAVES, max_size=3)
_VALUES = _LEAVES | st.dictionaries(st.sampled_from("abc"), _LEAVES | _SECTIONS, max_size=3)
_LAYERS = st.lists(st.dictionaries(st.sampled_from("abc"), _VALUES, max_size=3), max_size=4)


def _naive(into: Any, values: Any) -> Any:
    if isinstance(into, dict) and isinstance(values, dict):
        return {**into, **{k: _naive(into[k], v) if k in into else v for k, v in values.items()}}
    return values


@given(_LAYERS)
def test_merging_is_as_by_hand_and_every_leaf_has_the_source_of_its_value(
    layers: list[dict[str, Any]],
) -> None:
    merged = merge(Layer(str(n), values) for n, values in enumerate(layers))
    expected: Any = {}
    for values in layers:
        expected = _naive(expected, values)
    assert merged.values == expected
    assert merged.sources.keys() == dict(parts(merged.values)).keys()
    for key, value in leaves(merged.values):
        at: Any = layers[int(merged.sources[key])]
        for part in key.split("."):
            at = at[part]
        assert at == value


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["1e-3", "off", "# no comment", "a: b", "two\nlines", "\ud800", "UCX"])
)
_SHALLOW = (
    _SCALARS
    | st.lists(_SCALARS, max_size=3)
    | st.dictionaries(st.text(max_size=6), _SCALARS, max_size=3)
)
_ANYTHING = (
    _SHALLOW
    | st.lists(_SHALLOW, max_size=2)
    | st.dictionaries(st.text(max_size=6), _SHALLOW, max_size=2)
)
_SECTION_KEYS = sorted({key.rpartition(".")[2] for key in READ if "." in key})
_ARGUMENTS = st.dictionaries(
    st.sampled_from(sorted({key.partition(".")[0] for key in READ})),
    _ANYTHING | st.dictionaries(st.sampled_from(_SECTION_KEYS), _ANYTHING),
    max_size=6,
)


@given(_ARGUMENTS, st.sampled_from(["agg", "prefill", "decode", "encode"]), st.booleans())
def test_whatever_the_values_are_there_are_findings_and_no_crash(
    values: dict[str, Any],
    role: str,
    allow_unknown: bool,  # noqa: FBT001
) -> None:
    args = built(role=role, override=values, wanted=IntendedUse(allows_unknown=allow_unknown))
    for finding in args.findings:
        assert all(part.encode() for part in finding)
    findings = check_values(args.values, allow_unknown=allow_unknown)
    assert (args.case is None) == any(finding.is_error for finding in findings)
    check_rules(EngineCase(role, EngineModel(args.values), frozenset(), IntendedUse()))


@given(st.dictionaries(st.text(max_size=6), _ANYTHING, max_size=4))
def test_what_is_printed_reads_as_what_it_is(values: dict[str, Any]) -> None:
    values = json.loads(json.dumps(values).replace("\\ud800", "x"))
    sources = {key: f"source of {key!r}" for key, _ in leaves(values)}
    for lines in (yaml_lines(values), yaml_lines(values, sources)):
        assert yaml.safe_load("\n".join(lines)) == values
