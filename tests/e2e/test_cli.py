"""The commands that ask a gateway, as a person or a script runs them."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.engine.tokens import expected
from support.gateway.processes import MODEL, Cluster, eventually, fleet_config, run_cli, run_here


def output(*arguments: str, stdin: str = "") -> str:
    ended = run_here(*arguments, stdin=stdin)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def numbers(line: str) -> list[int]:
    return [int(word) for word in line.split()]


def test_generate_prints_the_token_ids(either: Cluster) -> None:
    ended = run_cli(
        *("generate", "--insecure", "--target", either.gateway.address),
        *("--tokens", "1,2,3", "--max-tokens", "5"),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    printed = ended.stdout
    assert numbers(printed) == expected([1, 2, 3], 5)
    assert printed.endswith("\n")


def test_generate_reads_a_file_and_ends_with_the_receipt(disagg: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text("10, 20\n30 40\n")
    lines = output(
        *("generate", "--insecure", "--target", disagg.gateway.address, "--tokens", f"@{file}"),
        *("--max-tokens", "6", "--ttft-ms", "2000", "--itl-ms", "50", "--priority", "7"),
        *("--model", MODEL, "--objective", "chat", "--receipt"),
    ).splitlines()
    assert numbers(lines[0]) == expected([10, 20, 30, 40], 6)
    assert len(lines) == 2
    receipt = json.loads(lines[1])
    assert receipt["decision"]["isl_tokens"] == 4
    sla = receipt["decision"]["sla"]
    assert (sla["ttft_ms"], sla["itl_ms"], sla["priority"]) == (2000, 50, 7)
    assert sla["objective"] == "chat"
    assert receipt["actual"]["outcome"] == "completed"
    assert receipt["actual"]["output_tokens"] == 6
    assert [attempt["worker"] for attempt in receipt["attempts"]] == [
        stage["worker"] for stage in receipt["decision"]["stages"]
    ]


def test_generate_makes_up_a_prompt_of_a_length(agg: Cluster) -> None:
    lines = output(
        *(
            "generate",
            "--insecure",
            "--target",
            agg.gateway.address,
            "--isl",
            "500",
            "--max-tokens",
            "3",
        ),
        "--receipt",
    ).splitlines()
    assert len(numbers(lines[0])) == 3
    assert json.loads(lines[-1])["decision"]["isl_tokens"] == 500


@pytest.mark.parametrize(
    ("options", "status", "naming"),
    [
        (("--isl", "5", "--ttft-ms", "fast"), 2, "--ttft-ms"),
        (("--isl", "5", "--max-tokens", "0"), 1, "stopping.max_tokens"),
        (("--isl", "5", "--model", "nobody"), 1, "NOT_FOUND"),
        (("--isl", "5", "--max-tokens", "-1"), 2, "--max-tokens"),
        (("--tokens", "1,x"), 2, "'x'"),
        (("--tokens", "@/no/such/file"), 2, "/no/such/file"),
        (("--tokens", "1", "--isl", "1"), 2, "--tokens or --isl"),
        ((), 2, "--tokens or --isl"),
    ],
)
def test_generate_says_what_is_wrong(
    agg: Cluster, options: tuple[str, ...], status: int, naming: str
) -> None:
    ended = run_here("generate", "--insecure", "--target", agg.gateway.address, *options)
    assert ended.returncode == status, ended.stderr
    assert naming in ended.stderr
    assert "Traceback" not in ended.stderr


def total_requests(cluster: Cluster) -> int:
    return sum(pool.requests_total for pool in cluster.gateway.pools())


def test_explain_decides_and_sends_nothing(disagg: Cluster) -> None:
    """No decision is counted and no lease taken; that no worker is called is in test_bad_input."""
    eventually(disagg.gateway.is_idle, "what other tests left is over")
    before = total_requests(disagg)
    decision = json.loads(
        output(
            *("explain", "--insecure", "--target", disagg.gateway.admin_address, "--isl", "9000"),
            *("--ttft-ms", "150", "--itl-ms", "40", "--max-tokens", "9", "--json"),
        )
    )
    assert decision["isl_tokens"] == 9000
    assert decision["max_tokens"] == 9
    prefill, decode = decision["stages"]
    assert (prefill["stage"], prefill["cell"], prefill["pool"]) == ("STAGE_PREFILL", [1, 0], "p")
    assert (decode["stage"], decode["cell"], decode["pool"]) == ("STAGE_DECODE", [1, 1], "d")
    for choice, pool in ((prefill, "p"), (decode, "d")):
        assert choice["base_pool"] == pool
        assert choice["worker"] in disagg.addresses(pool)
        assert {c["worker"] for c in choice["candidates"]} == set(disagg.addresses(pool))
        # The fullest of those that meet the targets; the least seconds win in the test below.
        assert choice["candidates"][0]["worker"] == choice["worker"]
        assert [target["source"] for target in choice["targets"]] == ["request"]
    assert prefill["candidates"][0]["predicted_ttft_ms"] > 0
    assert decode["candidates"][0]["predicted_itl_ms"] > 0
    assert decision["text"]
    assert total_requests(disagg) == before
    assert disagg.gateway.is_idle()


def test_explain_without_targets_names_the_least_seconds(disagg: Cluster) -> None:
    decision = json.loads(
        output(
            *("explain", "--insecure", "--target", disagg.gateway.admin_address),
            *("--isl", "9000", "--json"),
        )
    )
    for choice in decision["stages"]:
        # Equal workers are told apart by chance, so the winner need not be the first of them.
        scores = {c["worker"]: c["score_s"] for c in choice["candidates"]}
        assert len(scores) == 2
        assert scores[choice["worker"]] == choice["candidates"][0]["score_s"]
        # One that had none of the last requests of other tests may go first.
        assert choice.get("starved") or scores[choice["worker"]] == min(scores.values())


def test_explain_says_it_in_words(disagg: Cluster) -> None:
    printed = output(
        "explain", "--insecure", "--target", disagg.gateway.admin_address, "--isl", "100"
    )
    assert "chosen" in printed
    assert "no target" in printed or "middle" in printed
    assert any(address in printed for address in disagg.addresses("p"))
    assert any(address in printed for address in disagg.addresses("d"))


def test_explain_refuses_what_generate_refuses(disagg: Cluster) -> None:
    ended = run_here(
        *(
            "explain",
            "--insecure",
            "--target",
            disagg.gateway.admin_address,
            "--isl",
            "5",
            "--max-tokens",
            "0",
        )
    )
    assert ended.returncode == 1
    assert "INVALID_ARGUMENT" in ended.stderr
    assert "stopping.max_tokens" in ended.stderr


def test_pools_as_json(disagg: Cluster) -> None:
    shown: dict[str, Any] = {}

    def is_rest() -> bool:
        """Whether what other tests left is over, as far as the gateway has looked."""
        printed = output("pools", "--insecure", "--target", disagg.gateway.admin_address, "--json")
        shown.update(json.loads(printed))
        loads = [worker["load"]["running_requests"] for worker in shown["workers"]]
        return not any(loads + [pool["inflight"] for pool in shown["pools"]])

    eventually(is_rest, "nothing runs")
    assert [pool["name"] for pool in shown["pools"]] == ["p", "d"]
    for pool in shown["pools"]:
        assert (pool["workers"], pool["workers_ready"], pool["inflight"]) == (2, 2, 0)
        assert "llama-3.1-8b-h100" in pool["estimator"]
    workers = {worker["worker"]: worker for worker in shown["workers"]}
    assert set(workers) == {*disagg.addresses("p"), *disagg.addresses("d")}
    for worker in workers.values():
        assert worker["state"] == "ready"
        assert worker["models"] == [MODEL]
        assert worker["kv_transfer_backend"] == "NIXL"


def test_pools_as_tables(disagg: Cluster) -> None:
    printed = output("pools", "--insecure", "--target", disagg.gateway.admin_address)
    for address in (*disagg.addresses("p"), *disagg.addresses("d")):
        assert address in printed


def test_asking_nobody_fails_in_words() -> None:
    ended = run_cli("pools", "--insecure", "--target", "127.0.0.1:9")
    assert ended.returncode == 1
    assert ended.stderr.startswith("slagate: UNAVAILABLE:")
    assert "Traceback" not in ended.stderr


def test_grid_select_answers_each_line(tmp_path: Path) -> None:
    config = tmp_path / "fleet.json"
    config.write_text(json.dumps(fleet_config({"p": ("prefill", []), "d": ("decode", [])})))
    asked: list[Any] = [
        {"isl": 100, "ttft_ms": 150},
        {"isl": 8000, "ttft_ms": 500},
        {"isl": 100},
        {"ttft_ms": 150},
    ]
    stdin = "".join(json.dumps(row) + "\n" for row in asked)
    lines = output("grid", "select", str(config), "--stage", "prefill", stdin=stdin).splitlines()
    answers = [json.loads(line) for line in lines]
    assert [(a["row"], a["col"]) for a in answers[:3]] == [(0, 0), (1, 1), (0, 1)]
    assert answers[0] | {"row": 0, "col": 0} == answers[0]
    assert (answers[0]["base_pool"], answers[0]["pool"], answers[0]["pool_name"]) == (0, 0, "p")
    assert answers[3]["error"].startswith("isl:")
    assert len(answers) == 4


def test_grid_select_refuses_a_stage_the_file_has_not(tmp_path: Path) -> None:
    config = tmp_path / "fleet.json"
    config.write_text(json.dumps(fleet_config({"p": ("prefill", []), "d": ("decode", [])})))
    ended = run_here("grid", "select", str(config), "--stage", "agg")
    assert ended.returncode == 2
    assert "--stage" in ended.stderr
