"""What people see of decisions, pools and workers."""

import pytest

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.router.cli.client_tables import print_decision, print_pools


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, header lines included, without empty ones at the end."""
    lines = [line.replace("┃", "│") for line in text.splitlines()]
    return [[c.strip() for c in line.strip("│ ").split("│")] for line in lines if "│" in line]


def prefill() -> gw.StageChoice:
    look = gw.PoolLook(name="p", coefficients=gw.Coefficients(prefill_scale=2.0))
    candidates = [
        gw.Candidate(
            worker="w1:1",
            pool="p",
            rank=0,
            inflight=2,
            foreign_requests=3,
            queued_tokens=1200,
            queued_s=0.05,
            foreign_s=0.01,
            device_tokens=512,
            host_tokens=64,
            predicted_ttft_ms=130.04,
            score_s=0.13,
        ),
        gw.Candidate(worker="w1:1", pool="p", rank=1, score_s=0.2, suspect=True),
        gw.Candidate(worker="w2:1", pool="p", score_s=0.3, excluded="at its limit"),
    ]
    return gw.StageChoice(
        stage=gw.STAGE_PREFILL, cell=[0, 1], pool="p", worker="w1:1", rank=0,
        candidates=candidates, pools=[look],
    )  # fmt: skip


def shown(capsys: pytest.CaptureFixture[str], *choices: gw.StageChoice) -> str:
    print_decision(gw.Decision(isl_tokens=1000, stages=choices, text="In words."))
    return capsys.readouterr().out


def test_a_prefill_candidate_shows_what_it_was_chosen_by(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, prefill())
    assert out.startswith("prefill: cell [0][1], pool p")
    assert out.endswith("In words.\n")
    assert rows(out) == [
        [
            *("worker", "rank", "cached", "uncached", "queued tokens", "queue s", "in flight"),
            *("TTFT ms", "load s"),
        ],
        [
            *("w1:1", "0", "576 (64 on host)", "424", "1,200", "0.1200", "2 + 3"),
            *("130.0", "0.1300", "chosen"),
        ],
        ["w1:1", "1", "0", "1,000", "0", "0.0000", "0", "-", "0.2000", "suspect"],
        ["w2:1", "-", "0", "1,000", "0", "0.0000", "0", "-", "0.3000", "at its limit"],
    ]


def test_a_decode_candidate_shows_its_batch_and_no_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    winner = gw.Candidate(
        worker="d1:1",
        pool="d",
        inflight=4,
        context_tokens=9000,
        predicted_itl_ms=8.04,
        score_s=0.04,
    )
    choice = gw.StageChoice(
        stage=gw.STAGE_DECODE, pool="d", worker="d1:1", candidates=[winner],
        pools=[gw.PoolLook(name="d")],
    )  # fmt: skip
    assert rows(shown(capsys, choice)) == [
        ["worker", "context tokens", "in flight", "ITL ms", "load s"],
        ["d1:1", "9,000", "4", "8.0", "0.0400", "chosen"],
    ]


def test_candidates_of_several_pools_show_their_pool_and_a_starved_winner_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choice = prefill()
    choice.starved = True
    choice.pools.add(name="q")
    choice.candidates.add(worker="w9:1", pool="q")
    header, first, *_, last = rows(shown(capsys, choice))
    assert (header[1], first[1], last[1]) == ("pool", "p", "q")
    assert first[-1] == "chosen, as it was idle for long"


def test_a_target_that_will_be_missed_is_told_with_what_is_predicted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choice = prefill()
    told = "prefill: the TTFT target of 100 ms will be missed: 130.0 ms are predicted."
    for ms, source, missed in (
        (100, "request", True), (100, "objective", True), (100, "grid", False), (131, "request", False),
    ):  # fmt: skip
        del choice.targets[:]
        choice.targets.add(field="ttft_ms", ms=ms, source=source)
        lines = shown(capsys, choice).splitlines()
        assert (lines[-1] == told) == missed
        assert ("missed" in lines[-1]) == missed
    choice.targets[0].ms = 1
    choice.candidates[0].ClearField("predicted_ttft_ms")
    assert "missed" not in shown(capsys, choice), "nothing is predicted"


def test_without_a_winner_nothing_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    choice = prefill()
    choice.worker = ""
    choice.candidates[0].excluded = "not_ready"
    assert [row[-1] for row in rows(shown(capsys, choice))][1] == "not_ready"


def test_workers_show_their_events_and_what_came_of_predictions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = gw.WorkerStatus(
        worker="w:1",
        pool="p",
        state="ready",
        events_mode="none",
        events_reason="it has no such RPC",
        prefix=gw.PrefixTruth(predicted_tokens=1000, engine_cached_tokens=1200, requests=3),
    )
    pools = gw.ListPoolsResponse(
        pools=[
            gw.PoolStatus(
                name="p",
                stage=gw.STAGE_PREFILL,
                ttft=gw.Predictions(
                    basis="profile",
                    pairs=64,
                    bias=-0.25,
                    median_error=0.126,
                    coverage=0.9,
                    spread=0,
                ),
                itl=gw.Predictions(basis="learnt"),
                workers=3,
                workers_ready=2,
                workers_draining=1,
                workers_unpaired=2,
            )
        ],
        policy="slagate",
        max_attempts=3,
        waiting_requests=4,
        warnings=["old key"],
        config_version="5f0c",
        config_age_s=4321.4,
        admission="on",
        file_admission="shadow",
        spill="any",
        bypass="off",
    )
    silent = gw.WorkerStatus(worker="v:1", pool="p", state="not_ready", reason="gone")
    lonely = gw.WorkerStatus(worker="u:1", pool="p", state="ready", pair_problem="fits none")
    print_pools(pools, gw.ListWorkersResponse(workers=[worker, silent, lonely]))
    out = capsys.readouterr().out
    assert "policy slagate; a stage may try 3 workers; 4 requests wait" in out
    assert "warning: old key" in out
    assert "configuration 5f0c, in force for 4,321 s\n" in out
    assert "admission on (the fleet file says shadow), spill any, bypass off\n" in out
    (_, pool, _, predictions, header, first, second, third) = rows(out)
    assert (pool[0], pool[4]) == ("p", "2/3 (+1 draining), 2 without a partner")
    assert predictions == ["p", "TTFT", "profile, calibrated", "64", "13%", "-25%", "90%"]
    assert header[4:6] == ["KV events", "cached (predicted)"]
    assert first[4:6] == ["none (it has no such RPC)", "1,200 (1,000)"]
    assert (second[2], second[4], second[5]) == ("not_ready (gone)", "-", "-")
    assert third[2] == "ready (fits none)"


def test_piped_output_is_wide_enough_for_every_figure_unless_columns_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    load = oe.LoadInfo(running_requests=12, used_kv_blocks=12345, total_kv_blocks=20000)
    prefix = gw.PrefixTruth(predicted_tokens=1_000_000, engine_cached_tokens=1_200_000)
    worker = gw.WorkerStatus(
        worker="10.20.30.40:50051", pool="prefill-tp4", state="ready", engine="tensorrt_llm 1.0.0",
        events_mode="live", load=load, prefix=prefix,
    )  # fmt: skip
    silent = gw.WorkerStatus(worker="w:1", state="not_ready", reason="UNAVAILABLE: " + "no " * 80)
    workers = gw.ListWorkersResponse(workers=[worker, silent])
    print_pools(gw.ListPoolsResponse(), workers)
    out = capsys.readouterr().out
    assert "…" not in out
    assert "12,345/20,000" in out
    assert "1,200,000 (1,000,000)" in out
    monkeypatch.setenv("COLUMNS", "90")
    print_pools(gw.ListPoolsResponse(), workers)
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 90
