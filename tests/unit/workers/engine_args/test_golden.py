"""Every case of tests/golden/engine-args-cases.yaml gives exactly its findings.

ENGINE-01, ENGINE-02, ENGINE-03, ENGINE-04, ENGINE-05, ENGINE-06, ENGINE-07, ENGINE-09 and ENGINE-10 are
among them. The codes are in the cases; the words are in tests/golden/engine-args.txt, which
`pytest --rewrite-golden` writes anew.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slagate.router.commands import cli
from slagate.workers.engine_args.rules.table import CODES

CASES: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).parents[3].joinpath("golden", "engine-args-cases.yaml").read_text()
)
UNREADABLE = [case for case in CASES if "exit" in case]
BAD = [case for case in CASES if "exit" in case or case["codes"]]
NO_ENVIRONMENT = {"UCX_TLS": None, "TRTLLM_USE_UCX_KVCACHE": None}


Outcome = tuple[int, list[dict[str, str]], str]
OUTCOMES: dict[str, Outcome] = {}
"""Of each case that was run: a command line takes as long to parse as all else of a test."""


def outcome(case: dict[str, Any], folder: Path) -> Outcome:
    """Exit status, findings, and what is said on stderr, of a case."""
    if case["name"] not in OUTCOMES:
        OUTCOMES[case["name"]] = run_case(case, folder)
    return OUTCOMES[case["name"]]


def run_case(case: dict[str, Any], folder: Path) -> Outcome:
    file, peer = folder / "engine.yaml", folder / "peer.yaml"
    file.write_text(case.get("raw") or yaml.safe_dump(case["args"], sort_keys=False))
    arguments = ["--role", case["role"], "--extra-engine-args", str(file), "--json"]
    if "peer" in case:
        peer.write_text(yaml.safe_dump(case["peer"], sort_keys=False))
        arguments += ["--peer-engine-args", str(peer)]
    ended = CliRunner().invoke(
        cli,
        ["worker", "check", *arguments, *case.get("options", [])],
        env=NO_ENVIRONMENT | case.get("env", {}),
    )
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    found = [json.loads(line.replace(f"{folder}/", "")) for line in ended.stdout.splitlines()]
    said = [line for line in ended.stderr.splitlines() if line.startswith("slagate: ")]
    return ended.exit_code, found, "\n".join(said).replace(f"{folder}/", "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_case_gives_exactly_its_findings(case: dict[str, Any], tmp_path: Path) -> None:
    status, found, said = outcome(case, tmp_path)
    if "exit" in case:
        assert (status, found) == (case["exit"], [])
        assert said
        return
    assert said == ""
    assert [finding["code"] for finding in found] == case["codes"]
    assert status == int(any(finding["severity"] == "error" for finding in found))


def test_the_words_of_every_case(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    lines = []
    for case in BAD:
        status, found, said = outcome(case, tmp_path)
        lines += [f"--- {case['name']}", f"exit {status}", *([said] if said else [])]
        for finding in found:
            lines += [
                f"{finding['severity']} {finding['code']} {finding['of']}",
                f"  {finding['key']} {finding['text']}",
                f"  fix: {finding['advice']}",
            ]
        lines.append("")
    golden("engine-args.txt", "\n".join(lines))


def test_there_are_cases_enough_and_one_of_every_code() -> None:
    assert len(BAD) >= 60
    assert {code for case in CASES for code in case.get("codes", [])} == CODES.keys()
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)


def test_the_cases_of_the_bank_are_among_them() -> None:
    names = " ".join(case["name"] for case in CASES)
    for number in (1, 2, 3, 4, 5, 6, 7, 9, 10):
        assert f"engine-{number:02}-" in names


def test_engine_04_suggests_the_next_whole_block(tmp_path: Path) -> None:
    (case,) = [each for each in CASES if each["name"] == "engine-04-a-buffer-off-the-blocks"]
    (finding,) = outcome(case, tmp_path)[1]
    assert finding["key"] == "cache_transceiver_config.max_tokens_in_buffer"
    assert finding["advice"] == "set it to 6528"


def test_engine_03_names_the_key_and_the_memory(tmp_path: Path) -> None:
    for name in ("engine-03-buffer-by-the-longest-sequence", "engine-03-with-bytes-of-a-token"):
        (case,) = [each for each in CASES if each["name"] == name]
        (finding,) = outcome(case, tmp_path)[1]
        assert finding["key"] == "cache_transceiver_config.max_tokens_in_buffer"
        assert "195 GiB" in finding["text"] or "194.9 GiB" in finding["text"]
