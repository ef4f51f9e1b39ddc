"""What `slagate recompute` says of files that are wrong, and how it ends."""

import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.fleet.fleet import prepare
from slagate.pools.fleet_file.models import Objective, Scheduling
from slagate.proto import gateway_pb2 as gw
from slagate.router.cli.receipts import json_line, parse_line, recompute_file
from slagate.router.receipts.config import UnusableReceipt, config_message, read_config
from slagate.router.receipts.recompute import decide_again
from slagate.router.receipts.record import ReceiptNumber, Record
from slagate.router.request.errors import Outcome
from slagate.workers.runtime.cooperative import run_at_once
from slagate.workers.runtime.usage import UsageError
from support.builders import config
from support.gateway.receipts import RandomFleet

FLEET = RandomFleet()
CONFIG = json_line(gw.WatchReceiptsResponse(config=FLEET.config))
RULES = {FLEET.config.version: read_config(FLEET.config)}
ORDINARY, OTHER = [
    seed
    for seed in range(100)
    for made in [FLEET.receipt(random.Random(seed))]
    if not made.replaced
    and len(made.decision.stages[0].pools) == 1
    and len(made.decision.stages[0].candidates) > 3
    and made.decision.stages[0].worker
][:2]


def receipt(seed: int = ORDINARY) -> dict[str, Any]:
    """A receipt as its line says it; the ordinary one has one pool of several rows and no retry."""
    made: gw.Receipt = FLEET.receipt(random.Random(seed))
    shown: dict[str, Any] = json.loads(json_line(gw.WatchReceiptsResponse(receipt=made)))
    return shown


def run(tmp_path: Path, *lines: str | dict[str, Any]) -> int:
    path = tmp_path / "receipts.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text))
    return recompute_file(str(path))


def test_receipts_that_agree_end_with_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, CONFIG, receipt(), receipt(OTHER)) == 0
    assert capsys.readouterr().out == "2 receipts, 4 choices: 4 agree, 0 differ\n"


def test_stdin_is_read_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in"
    path.write_text(f"{CONFIG}\n{json.dumps(receipt())}\n")
    with path.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        assert recompute_file("-") == 0
    assert "0 differ" in capsys.readouterr().out


def test_a_line_for_each_choice_that_differs_and_a_status_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = receipt()
    (choice, _) = changed["receipt"]["decision"]["stages"]
    winner = choice["candidates"][0]
    winner["queued_s"] += 1000.0
    assert run(tmp_path, CONFIG, receipt(OTHER), changed) == 1
    found, summary = capsys.readouterr().out.splitlines()
    told = f"receipt 1, 'r-1', prefill: recorded {winner['worker']}"
    assert found.startswith(told)
    assert ", recomputed " in found
    assert summary.endswith(" 1 differ")


def test_another_draw_between_equals_names_another_winner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(300):
        changed = receipt(seed)
        choice = changed["receipt"]["decision"]["stages"][-1]
        open_ = [c for c in choice["candidates"] if not c["excluded"] and not c["suspect"]]
        keys = [(c["score_s"], c["last_chosen"]) for c in open_]
        if len(keys) > 1 and keys[0] == keys[1] == min(keys) and choice["draw"] < 0.3:
            choice["draw"] = 0.999
            assert run(tmp_path, CONFIG, changed) == 1
            recorded, recomputed = capsys.readouterr().out.splitlines()[0].split(", recomputed ")
            assert choice["worker"] in recorded
            assert choice["worker"] not in recomputed or "rank" in recomputed
            return
    raise AssertionError("no seed has a tie")


def test_a_line_says_how_many_were_missed_only_where_some_were() -> None:
    assert "missed" not in receipt()
    assert json.loads(json_line(gw.WatchReceiptsResponse(missed=3)))["missed"] == 3


@pytest.mark.parametrize("mode", ["on", "shadow", "off"])
@pytest.mark.parametrize("objective", ["", "kept", "behind"])
def test_what_became_of_a_request_as_it_came_is_decided_again(objective: str, mode: str) -> None:
    """Whatever else is told of a request that is predicted to miss, or not, differs."""
    n_missed = 0
    for seed in range(300):
        made = FLEET.receipt(random.Random(seed), seed)
        decision = made.decision
        if decision.sla.objective != objective or decision.admission_mode != mode:
            continue
        n_missed += decision.admission != ""
        for told in {"", "refused", "shadow", "served", "relegated", "x"} - {decision.admission}:
            changed = gw.Receipt()
            changed.CopyFrom(made)
            changed.decision.admission = told
            found = [each for each in decide_again(changed, RULES) if each is not None]
            recomputed = decision.admission or "none"
            assert found == [(decision.request_id, "admission", told or "none", recomputed)]
    assert n_missed > 3


def test_another_mode_of_admission_is_found_where_it_matters() -> None:
    some = (FLEET.receipt(random.Random(seed), seed) for seed in range(300))
    made = next(each for each in some if each.decision.admission == "refused")
    assert made.decision.admission_mode == "on"
    for mode, found in (("shadow", "shadow"), ("off", "served")):
        made.decision.admission_mode = mode
        *same, last = decide_again(made, RULES)
        assert same == [None] * len(same)
        assert last == (made.decision.request_id, "admission", "refused", found)


def test_missed_receipts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, CONFIG, receipt() | {"missed": 7}) == 0
    assert capsys.readouterr().out.endswith("; 7 receipts were missed by the reader\n")


def test_a_file_may_hold_more_than_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agg = RandomFleet("agg")
    config = json_line(gw.WatchReceiptsResponse(config=agg.config))
    other = json_line(gw.WatchReceiptsResponse(receipt=agg.receipt(random.Random(1))))
    assert run(tmp_path, CONFIG, receipt(), config, other) == 0
    assert capsys.readouterr().out.startswith("2 receipts, ")


def test_a_run_without_a_decision_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stamp = ReceiptNumber(1, 1.0, FLEET.config.version)
    refused = run_at_once(Record(0.0).full(Outcome.INVALID, 1.0, stamp))
    line = json_line(gw.WatchReceiptsResponse(receipt=refused))
    assert run(tmp_path, CONFIG) == 1
    assert run(tmp_path, CONFIG, line) == 1
    assert capsys.readouterr().out.count("nothing to decide again") == 2


def refused(version: str) -> dict[str, Any]:
    """The line of a request that was refused before it was decided."""
    stamp = ReceiptNumber(1, 1.0, version)
    made = run_at_once(Record(0.0).full(Outcome.INVALID, 1.0, stamp))
    shown: dict[str, Any] = json.loads(json_line(gw.WatchReceiptsResponse(receipt=made)))
    return shown


def test_what_was_refused_before_it_was_decided_needs_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what some choice was made under is printed, and it may have ended under another version."""
    line = refused("0123456789abcdef")
    assert list(decide_again(gw_receipt(line), {})) == []
    assert run(tmp_path, CONFIG, line, receipt()) == 0
    assert capsys.readouterr().out == "2 receipts, 2 choices: 2 agree, 0 differ\n"


def gw_receipt(line: dict[str, Any]) -> gw.Receipt:
    return parse_line(json.dumps(line).encode()).receipt


def stages(line: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = line["receipt"]["decision"]["stages"]
    return found


def stage(line: dict[str, Any]) -> dict[str, Any]:
    return stages(line)[0]


def candidate(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = stage(line)["candidates"][1]
    return found


Change = Callable[[dict[str, Any]], object]
STAGE = r"receipt\.decision\.stages\[0\]"
DAMAGE: dict[str, tuple[Change, str]] = {
    "unknown field": (lambda v: candidate(v).update(inflght=3), 'no field named "inflght"'),
    "negative": (lambda v: candidate(v).update(inflight=-3), "candidates: inflight: .*-3"),
    "word": (lambda v: candidate(v).update(queued_s="slow"), "candidates: queued_s: .*slow"),
    "huge": (lambda v: candidate(v).update(queued_s=10**400), "too large"),
    "not a number": (
        lambda v: candidate(v).update(foreign_s="NaN"),
        STAGE + r"\.candidates\[1\]\.foreign_s: must be a finite number",
    ),
    "too many": (
        lambda v: candidate(v).update(queued_tokens=2**63),
        STAGE + r"\.candidates\[1\]\.queued_tokens: is too large",
    ),
    "no state": (
        lambda v: candidate(v).update(state="asleep"),
        STAGE + r"\.candidates\[1\]\.state: there is no state 'asleep'",
    ),
    "pool of no look": (
        lambda v: candidate(v).update(pool="else"),
        STAGE + r"\.candidates\[1\]\.pool: 'else' is not among",
    ),
    "same row": (
        lambda v: candidate(v).update(row=stage(v)["candidates"][0]["row"]),
        STAGE + r"\.candidates\[1\]\.row: ",
    ),
    "pair out of range": (
        lambda v: candidate(v).update(pair=9),
        STAGE + r"\.candidates\[1\]\.pair: there is no key 9",
    ),
    "partner out of range": (
        lambda v: stage(v).update(pairing={"partners": [{"key": 3}]}),
        STAGE + r"\.pairing\.partners\[0\]\.key: there is no key 3",
    ),
    "row out of range": (
        lambda v: candidate(v).update(row=2**31),
        STAGE + r"\.candidates\[1\]\.row: 2147483648 is not",
    ),
    "candidate gone": (
        lambda v: stage(v)["candidates"].pop(),
        STAGE + r"\.candidates: \d of \d; a receipt from a trailer",
    ),
    "row gone": (
        lambda v: stage(v).update(
            candidates=[c for c in stage(v)["candidates"] if c["row"]],
            candidates_total=sum(c["row"] > 0 for c in stage(v)["candidates"]),
        ),
        STAGE + r"\.(pools\[0\]: rows of pool|candidates\[\d\]\.row: )",
    ),
    "no such stage": (
        lambda v: v["receipt"]["replaced"].append(stage(v) | {"stage": "STAGE_AGG"}),
        r"receipt\.replaced\[0\]\.stage: the fleet file has no such stage",
    ),
    "another stage": (
        lambda v: stage(v).update(stage="STAGE_AGG"),
        r"receipt\.decision\.stages: must be prefill, decode \(got agg, decode\)",
    ),
    "stage gone": (
        lambda v: stages(v).pop(),
        r"receipt\.decision\.stages: must be prefill, decode \(got prefill\)",
    ),
    "stage twice": (
        lambda v: stages(v).append(stages(v)[1]),
        r"receipt\.decision\.stages: must be prefill, decode \(got prefill, decode, decode\)",
    ),
    "stages in another order": (
        lambda v: stages(v).reverse(),
        r"receipt\.decision\.stages: must be prefill, decode \(got decode, prefill\)",
    ),
    "no stage but a retry": (
        lambda v: v["receipt"].update(
            replaced=[stage(v)], decision=v["receipt"]["decision"] | {"stages": []}
        ),
        r"receipt\.decision\.stages: must be prefill, decode \(got nothing\)",
    ),
    "no stage but an attempt": (
        lambda v: v["receipt"].update(
            attempts=[{"worker": "w:1"}], decision=v["receipt"]["decision"] | {"stages": []}
        ),
        r"receipt\.decision\.stages: must be prefill, decode \(got nothing\)",
    ),
    "draw": (lambda v: stage(v).update(draw=1.0), STAGE + r"\.draw: must be in \[0, 1\), got 1"),
    "unknown pool": (
        lambda v: stage(v)["pools"].append({"name": "else"}),
        STAGE + r"\.pools\[\d\]\.name: the fleet file has no pool 'else'",
    ),
    "leases": (
        lambda v: stage(v)["pools"][0].update(leases=2**63),
        STAGE + r"\.pools\[0\]\.leases: is too large",
    ),
    "coefficient": (
        lambda v: stage(v)["pools"][0]["coefficients"].update(prefill_scale=-1.0),
        STAGE + r"\.pools\[0\]\.coefficients: prefill_scale ",
    ),
    "basis": (
        lambda v: stage(v)["pools"][0].update(ttft_basis="guess"),
        STAGE + r"\.pools\[0\]\.ttft_basis: must be one of learnt, profile, grid",
    ),
    "calibration": (
        lambda v: stage(v)["pools"][0].update(ttft_calibration={"slope": 2.0}),
        STAGE + r"\.pools\[0\]\.ttft_calibration\.slope: must be between 0 and 1",
    ),
    "spread": (
        lambda v: stage(v)["pools"][0].update(itl_calibration={"spread": "NaN"}),
        STAGE + r"\.pools\[0\]\.itl_calibration\.spread: must be between 0 and 30",
    ),
    "target": (
        lambda v: v["receipt"]["decision"]["sla"].update(ttft_ms="Infinity"),
        r"receipt\.decision\.sla\.ttft_ms: must be a finite number",
    ),
    "mode of admission": (
        lambda v: v["receipt"]["decision"].update(admission_mode="maybe"),
        r"receipt\.decision\.admission_mode: must be one of off, shadow, on, learn; .*, got 'maybe'$",
    ),
    "older": (
        lambda v: v["receipt"]["decision"].pop("admission_mode"),
        r"receipt\.decision\.admission_mode: .*; receipts of older versions have none, got ''",
    ),
    "another version": (
        lambda v: v["receipt"].update(config_version="0123"),
        r"receipt\.config_version: '0123' is not the version of a configuration before it",
    ),
    "nothing": (lambda v: v.clear(), "must have a config or a receipt"),
}


@pytest.mark.parametrize(("change", "why"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_receipt_is_refused_by_line_and_field(
    change: Change, why: str, tmp_path: Path
) -> None:
    line = receipt()
    change(line)
    with pytest.raises(UsageError, match=rf"^line 3: .*{why}") as caught:
        run(tmp_path, CONFIG, receipt(OTHER), line)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (json.dumps(receipt())[:-200], "is not JSON"),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ("\x00", "is not JSON"),
        ('{"receipt": 5}', "receipt: "),
        (json.dumps({"receipt": {"decision": {"stages": {}, "model": "x" * 9000}}}), "stages"),
    ],
)
def test_what_is_no_line_of_receipts_is_refused(line: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^line 2: .*{why}") as caught:
        run(tmp_path, CONFIG, line)
    assert len(str(caught.value)) < 400


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "receipts"
    path.write_bytes(CONFIG.encode() + b"\n\xff\xfe\n")
    with pytest.raises(UsageError, match=r"^line 2: is not JSON"):
        recompute_file(str(path))


def test_a_file_must_be_there_and_start_with_its_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: No such file"):
        recompute_file(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="Is a directory"):
        recompute_file(str(tmp_path))
    with pytest.raises(UsageError, match=r"^line 1: there is none, the file is empty"):
        run(tmp_path)
    with pytest.raises(UsageError, match=r"^line 1: config: must come before the first receipt"):
        run(tmp_path, receipt())


def edited(**changes: Any) -> gw.GatewayConfig:
    made = gw.GatewayConfig()
    made.CopyFrom(FLEET.config)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_configuration_that_was_changed_is_refused() -> None:
    for changes in ({"version": "0"}, {"fleet": FLEET.config.fleet + " "}, {"policy": "other"}):
        with pytest.raises(
            UnusableReceipt, match=r"^config\.version: is not the digest of the rest"
        ):
            read_config(edited(**changes))
    changed = edited()
    profiled = next(each for each in changed.estimators if "1" in each.table)
    profiled.table = profiled.table.replace("1", "2", 1)
    with pytest.raises(UnusableReceipt, match=r"^config\.version"):
        read_config(changed)


def test_a_configuration_is_read_back_as_it_was() -> None:
    rules = read_config(FLEET.config)
    assert rules.version == FLEET.config.version
    assert {s.value: list(g.pool_names) for s, g in rules.grids.items()} == {
        "prefill": ["p-fast", "p-bulk"],
        "decode": ["d-fast", "d-bulk"],
    }
    assert [rules.estimators[name].profile is None for name in ("p-fast", "p-bulk")] == [
        True,
        False,
    ]


def test_a_configuration_says_how_its_requests_were_to_be_treated() -> None:
    modes = {"spill": "any", "admission": "on"}
    classes = {"chat": {"ttft_ms": 300, "policy": "protect", "weight": 3, "priority": 2}}
    prepared = prepare(config("agg", scheduling=modes, objectives=classes))
    read = read_config(config_message(prepared, policy="slagate")).config
    assert read.scheduling == Scheduling(spill="any", admission="on", bypass="off")
    assert read.objectives == {"chat": Objective(**classes["chat"])}
    assert read_config(FLEET.config).config.scheduling == Scheduling()


def test_the_version_is_that_of_the_content() -> None:
    assert RandomFleet().config.version == FLEET.config.version
    assert RandomFleet("agg").config.version != FLEET.config.version
