"""`slagate replay` as its users run it: its file, an interruption, a second run, its mistakes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slagate.router.replay.out import TIMES
from support.gateway.processes import SLAGATE, run_here
from support.limits import HANG_S

CLASSES = [
    {"name": "fast", "share": 0.5, "ttft_ms": 1000, "itl_ms": 15},
    {"name": "slow", "share": 0.5, "ttft_ms": 20000, "itl_ms": 100, "max_tokens": 100},
]
SUITES = Path(__file__).resolve().parents[2] / "configs" / "suites"


@pytest.fixture
def typed(tmp_path: Path) -> list[str]:
    (tmp_path / "classes.json").write_text(json.dumps(CLASSES))
    return [
        "replay",
        *("--config", str(SUITES / "fleets" / "split.json")),
        *("--trace", str(SUITES / "traces" / "conversation-800.jsonl")),
        *("--classes", str(tmp_path / "classes.json")),
        *("--out", str(tmp_path / "rows.json")),
        *("--policy", "prefix,round_robin", "--seed", "1", "--requests", "8", "--processes", "1"),
    ]


def test_an_interrupted_run_goes_on(typed: list[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "rows.json", tmp_path / "picture.svg"
    # Where the tests run in the background, a shell may have set this signal to be ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen([*SLAGATE, *typed, "--load", "2,1"], stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    assert child.stderr is not None
    with child:
        for line in child.stderr:
            if "1 of 6" in line:
                break
        child.send_signal(signal.SIGINT)
        assert child.wait(HANG_S) == 130
        assert "rows; run it again" in child.stderr.read() or out.exists()
    n_rows = len(json.loads(out.read_text())["rows"])
    assert 1 <= n_rows < 6
    done = run_here(*typed, "--load", "2,1", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert f"slagate: {n_rows} rows are there already" in done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["policy"], row["load"]) for row in rows] == [
        (policy, load) for load in (2.0, 1.0) for policy in ("prefix", "round_robin", "oracle")
    ]
    assert plot.exists()
    assert plot.with_stem("picture-latencies").exists()
    assert "round_robin" in done.stdout


def test_rows_do_not_depend_on_the_order_of_sets(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with other hashes of texts give the same rows, byte for byte but for times."""
    found = []
    for hash_seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        out = tmp_path / f"{hash_seed}.json"
        done = subprocess.run(
            [sys.executable, "-m", "slagate.router", *typed, "--out", str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        rows = json.loads(out.read_text())["rows"]
        found.append([json.dumps({k: v for k, v in row.items() if k not in TIMES}) for row in rows])
    assert len(found[0]) == 3
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--policy", "prefix,roundrobin"), 'did you mean "round_robin"'),
        (("--load", "1,x"), "--load: must be numbers with commas between (got '1,x')"),
        (("--load", "0"), "loads[0]"),
        (("--skip", "9999"), "has 800 rows, none from row 9999 on"),
        (("--suite", "sla-small"), "--config: is not taken with --suite, whose file says it"),
        (("--trace", "/no/such/trace"), "--trace /no/such/trace: is no file"),
        (("--policy", "oracle"), "is no known policy; there are slagate, prefix, least_loaded, "),
        (("--tune", "lmetric"), "--tune: lmetric has no parameters"),
        (("--plot", "x.pdf"), "--plot x.pdf: must end in .png or .svg"),
        (("--out", "/no/such/folder/x"), "--out /no/such/folder/x: cannot be written"),
    ],
)
def test_mistakes_are_told(typed: list[str], more: tuple[str, str], told: str) -> None:
    done = run_here(*typed, *more)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistake_in_the_classes_names_their_file(typed: list[str], tmp_path: Path) -> None:
    path = tmp_path / "classes.json"
    path.write_text(json.dumps([CLASSES[0] | {"policy": "protct"}, CLASSES[1]]))
    done = run_here(*typed)
    assert done.returncode == 2
    assert f"{path}: 1 problem" in done.stderr
    assert "classes[0].policy: must be " in done.stderr


@pytest.mark.parametrize(
    "option",
    [
        *(("--policy", "prefix"), ("--load", "1"), ("--requests", "800"), ("--skip", "0")),
        *(("--seed", "1"), ("--ideal",)),
    ],
)
def test_a_suite_says_all_that_options_say(option: tuple[str, ...]) -> None:
    done = run_here("replay", "--suite", "sla-small", *option)
    assert done.returncode == 2
    assert f"{option[0]}: is not taken with --suite" in done.stderr


def test_a_suite_that_does_not_come_along_is_told() -> None:
    done = run_here("replay", "--suite", "sla-big")
    assert done.returncode == 2
    assert "'sla-big' does not come along" in done.stderr


def test_without_a_suite_three_files_are_needed(typed: list[str]) -> None:
    done = run_here(*typed[:3])
    assert done.returncode == 2
    assert "--trace: is needed without --suite" in done.stderr
