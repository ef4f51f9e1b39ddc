"""Files that people have at hand and that are no fleet file: each gets one sentence on what to do."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slagate.pools.fleet_file.disguise import what_text_is
from slagate.pools.fleet_file.load import load_config, parse_config
from slagate.pools.grid.errors import ConfigError
from slagate.router.commands import cli
from support.fleet.files import agg_file, disagg_file

EPP = {
    "poolLabels": ["tp1", "tp2"],
    "sizeMin": 0,
    "sizeMax": 3000,
    "sizeResolution": 2,
    "latencyMinMs": 1000,
    "latencyMaxMs": 5000,
    "latencyResolution": 2,
    "mapping": [[1, 0], [1, 1]],
}
TEXT = json.dumps(disagg_file(), indent=2)
MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "x"},
    "data": {"grid.json": TEXT},
}
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"replicas": 1}}
PLUGINS = {
    "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [{"type": "queue-scorer"}, {"type": "pool-selector", "parameters": EPP}],
}
OWN = "put what is there into a JSON file of its own"
WRAPPER = "is not the fleet file itself, which is at"

FILES: dict[str, tuple[str, str]] = {
    "config-map": (
        yaml.safe_dump(MAP),
        f'is a Kubernetes ConfigMap with the fleet file at data["grid.json"]: {OWN}',
    ),
    "config-map-in-json": (
        json.dumps(MAP),
        f'is a Kubernetes ConfigMap with the fleet file at data["grid.json"]: {OWN}',
    ),
    "config-map-with-other-keys": (
        yaml.safe_dump(
            {**MAP, "data": {"readme": "num_prefill_pools, num_decode_pools", "g": TEXT}}
        ),
        f"is a Kubernetes ConfigMap with the fleet file at data.g: {OWN}",
    ),
    "config-map-with-two": (
        yaml.safe_dump({**MAP, "data": {"a": TEXT, "b": f"// old\n{TEXT}"}}),
        "is a Kubernetes ConfigMap with the fleet file at data.a, data.b: put the one that is meant",
    ),
    "config-map-of-plugins": (
        yaml.safe_dump({**MAP, "data": {"epp": yaml.safe_dump(PLUGINS)}}),
        f"is a Kubernetes ConfigMap with the fleet file at data.epp.plugins[1].parameters: {OWN}",
    ),
    "manifest": (
        yaml.safe_dump_all([MAP, DEPLOYMENT]),
        f'is a Kubernetes manifest with the fleet file at [0].data["grid.json"]: {OWN}',
    ),
    "list": (
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [DEPLOYMENT, MAP]}),
        f'is a Kubernetes List with the fleet file at items[1].data["grid.json"]: {OWN}',
    ),
    "deployment": (
        yaml.safe_dump(DEPLOYMENT),
        "is a Kubernetes Deployment without a fleet file in it",
    ),
    "odd-keys": (
        "2026-01-01:\n  true: " + json.dumps(EPP),
        f'{WRAPPER} ["2026-01-01"][true]: {OWN}',
    ),
    "plugin": (json.dumps({"type": "x", "parameters": EPP}), f"{WRAPPER} parameters: {OWN}"),
    "plugins": (
        yaml.safe_dump(PLUGINS),
        f"is a Kubernetes EndpointPickerConfig with the fleet file at plugins[1].parameters: {OWN}",
    ),
    "wrapper": (json.dumps({"name": "a", "config": disagg_file()}), f"{WRAPPER} config: {OWN}"),
    "deep": (json.dumps({"spec": {"router": agg_file()}}), f"{WRAPPER} spec.router: {OWN}"),
    "in-a-list": (json.dumps([EPP]), f"{WRAPPER} [0]: {OWN}"),
    "twice-json": (json.dumps(TEXT), f"{WRAPPER} $: {OWN}"),
    "yaml": (yaml.safe_dump(disagg_file()), "is YAML: write it as JSON, such as with yq -o json"),
    "bomb": (
        "a0: &a0 [x, x]\n"
        + "\n".join(f"a{at + 1}: &a{at + 1} [{f'*a{at}, ' * 9}]" for at in range(30)),
        "is YAML: write it as JSON",
    ),
    "loop": ("a: &a\n  b: *a\n", "is YAML: write it as JSON"),
    "helm": (
        yaml.safe_dump(MAP).replace("name: x", "name: {{ .Release.Name }}"),
        "is a template: give what it becomes when rendered, such as by helm template",
    ),
    "comments": (
        f"// a\n{TEXT}",
        "is not JSON, as it has comments (take them out), from line 1 on",
    ),
    "hashes": (
        f"\n# a\n{TEXT} /* b */",
        "is not JSON, as it has comments (take them out), from line 2",
    ),
    "comma": (
        TEXT.replace("\n  ]", ",\n // why\n /* , */ ]", 1),
        "is not JSON, as it has a comma before a closing bracket (take it out) and comments (take",
    ),
    "python": (
        repr({**disagg_file(), "enable_priority_retry": True}),
        "is not JSON, as it has single quotes (write double ones) and words of Python (write",
    ),
    "keys": (
        '{mode: "agg", "x": 1}',
        "is not JSON, as it has keys without quotes (put them in double",
    ),
    "page": (
        '{\n  "num_prefill_pools": <int>, // of them\n  "mode": "disagg"\n}',
        "is not JSON, as it has placeholders (write values in their place) and comments (take them out)",
    ),
    "fence": (f"```json\n{TEXT}\n```\n", "is not JSON, as it has lines of a Markdown fence (take"),
    "mark": (
        f"\ufeff{TEXT}",
        "is not JSON, as it has a byte order mark (save it as UTF-8 without one)",
    ),
    "page-with-words": (
        f"# Grid\n\nUse this:\n\n```json\n{TEXT}\n```\n\nThen run.\n",
        "has other text around its JSON: keep the object alone, from { to }",
    ),
    "error-page": (
        "<!DOCTYPE html><html><body>404</body></html>",
        "is HTML or XML, as of a page that a download got in place of the file",
    ),
    "config-map-in-base64": (
        yaml.safe_dump({**MAP, "data": None, "binaryData": {"grid.json": "e30="}}),
        "is a Kubernetes ConfigMap with binaryData: decode it, such as with base64 -d, into a JSON",
    ),
    "number": (
        TEXT.replace("8000", "${ISL_MAX}"),
        "is not JSON, as it has variables that nothing fills in here (write their values, as envsubst",
    ),
    "more": (f"{TEXT}\n{TEXT}", "goes on after the end of its JSON: keep one object"),
}


def problems(folder: Path, text: str) -> list[str]:
    path = folder / "fleet.json"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return list(map(str, caught.value.problems))


@pytest.mark.parametrize("name", FILES)
def test_what_people_have_at_hand_gets_one_sentence_that_says_what_to_do(
    tmp_path: Path, name: str
) -> None:
    text, says = FILES[name]
    (problem,) = problems(tmp_path, text)
    assert problem.startswith(f"$: {says}")


@pytest.mark.parametrize(
    "command",
    ["grid lint {}", "grid show {}", "grid select --stage prefill {}", "grid lint --lenient {}",
     "serve --insecure --worker-insecure --listen=127.0.0.1:0 --admin=127.0.0.1:0 --http=127.0.0.1:0"
     " --config {}"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config-map", "plugin", "comments"])
def test_every_command_says_the_same(tmp_path: Path, command: str, name: str) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(FILES[name][0])
    ended = CliRunner().invoke(cli, command.format(path).split(" "))
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert FILES[name][1] in ended.stderr
    assert len(ended.stderr.splitlines()) == 2


def test_a_text_that_is_only_broken_keeps_its_place(tmp_path: Path) -> None:
    for text in (
        "hello",
        '{"a": 1',
        f"// comment\n{TEXT[:-9]}",
        "{a",
        '{"a": b}',
        "[1, 2",
        '"',
        "\x00",
    ):
        (problem,) = problems(tmp_path, text)
        assert problem.startswith("$: is not JSON: "), text


@pytest.mark.parametrize(
    "name",
    [
        *(
            "${K8S_NAMESPACE}-p",
            "${NS:-dynamo}-p",
            "$(NS)-p",
            "$NS-p",
            "$ns-p",
            "{{ .Values.ns }}-p",
        ),
        *("<ns>-p", "<%= ns %>-p", "%NS%-p", "@NS@-p", "@@NS@@-p", "__NS__-p"),
    ],
)
def test_a_variable_in_a_name_loads_with_one_warning(name: str) -> None:
    content = disagg_file()
    content["prefill_pools"] = [name, f"{name}2"]
    config = parse_config(content, source="f")
    assert config.stages["prefill"].pool_names == (name, f"{name}2")
    (warning,) = config.warnings
    variable = name.rpartition("-")[0]
    says = f"has {variable}, which nothing fills in here: write the value, as envsubst does"
    assert warning == f"prefill_pools[0]: {says}"


def test_values_with_variables_are_one_problem_and_others_stay() -> None:
    content = disagg_file()
    content["prefill_pool_selection_strategy"] |= {"isl_max": "${A}", "ttft_min_ms": "${B}", "x": 1}
    content["pools"] = {"p-fast": {"workers": ["${HOST}:1"]}}
    with pytest.raises(ConfigError) as caught:
        parse_config(content, source="f")
    first, second = map(str, caught.value.problems)
    assert first.startswith("prefill_pool_selection_strategy.")
    assert "has ${A}, ${B}, ${HOST}, which nothing fills in here" in first
    assert second.startswith("prefill_pool_selection_strategy.x: unknown key")


@pytest.mark.parametrize("whole", [True, False])
def test_a_chain_of_pools_is_told_what_says_it_here(whole: bool) -> None:  # noqa: FBT001
    content = agg_file()
    strategy: dict[str, Any] = content["agg_pool_selection_strategy"] if whole else {}
    content["agg_pool_selection_strategy"] = {**strategy, "routing_priority": [0, 1, 2]}
    with pytest.raises(ConfigError) as caught:
        parse_config(content, source="f")
    (problem,) = map(str, caught.value.problems)
    assert problem.startswith(
        "agg_pool_selection_strategy.routing_priority: unknown key: here each cell of the mapping lists"
    )


@pytest.mark.parametrize(
    "part", ['"\\', "'\\", "/*", "'", "{ //a\n", ",", "<", "$", "${", "{'a': ", ", #\n"]
)
def test_each_character_of_a_long_text_is_looked_at_a_few_times_only(part: str) -> None:
    """A pattern that goes back from the end would take minutes for these."""
    assert what_text_is((part * 120_000)[: (1 << 18) - 1]) is None


def test_no_text_and_no_content_is_too_odd() -> None:
    rng = random.Random(1)
    parts = ["{", "}", "[", "]", ",", ":", '"', "'", "//", "/*", "*/", "#", "\n", " ", "\\", "${A}", "{{",
             "<a>", "None", "a", "-", "&a ", "*a", "!!int ", "!!set", "1", "---\n", "poolLabels", "mapping",
             "kind: ", "apiVersion: ", "!!binary ", "2026-01-01", "? ", "```", "\ufeff", "\t"]  # fmt: skip
    for _ in range(1500):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 30)))
        with pytest.raises(ConfigError):
            load_config("f", text=text)
