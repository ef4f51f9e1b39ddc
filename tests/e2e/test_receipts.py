"""Receipts of a real gateway, read and decided again by the commands, as an auditor would."""

import json
import subprocess
from pathlib import Path
from typing import Any

from support.engine.tokens import prompt
from support.gateway.foreign_client import Client, read, request
from support.gateway.processes import SLAGATE, Cluster, Pool, cluster, eventually, run_cli, run_here
from support.limits import HANG_S

N_REQUESTS = 30


def serve(client: Client, n: int) -> None:
    """Requests that share prefixes, all of them at once."""
    prompts = [prompt(200 + 32 * (i % 3), seed=i % 4) for i in range(n)]
    calls = [
        client.start(request(tokens, 5, request_id=f"r-{i}")) for i, tokens in enumerate(prompts)
    ]
    for call in calls:
        assert not read(call).failed


def lines_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


def test_all_receipts_of_a_run_come_out_the_same_offline(agg: Cluster) -> None:
    with Client(agg.gateway.address) as client:
        serve(client, N_REQUESTS)
    printed = run_cli(
        "receipts", "--insecure", "--target", agg.gateway.admin_address, "--limit", str(N_REQUESTS)
    )
    assert printed.returncode == 0, printed.stderr
    config, *receipts = lines_of(printed.stdout)
    assert json.loads(config["config"]["fleet"])["mode"] == "agg"
    assert len(receipts) == N_REQUESTS
    numbers = [int(each["receipt"]["number"]) for each in receipts]
    assert numbers == list(range(numbers[0], numbers[0] + N_REQUESTS))
    decided = run_cli("recompute", "-", stdin=printed.stdout)
    assert (decided.returncode, decided.stderr) == (0, "")
    assert (
        decided.stdout
        == f"{N_REQUESTS} receipts, {N_REQUESTS} choices: {N_REQUESTS} agree, 0 differ\n"
    )


def test_a_changed_file_fails_and_a_damaged_one_is_refused(agg: Cluster, tmp_path: Path) -> None:
    with Client(agg.gateway.address) as client:
        serve(client, 2)
    printed = run_here(
        "receipts", "--insecure", "--target", agg.gateway.admin_address, "--limit", "2"
    ).stdout
    first, second, third = lines_of(printed)
    winner = second["receipt"]["decision"]["stages"][0]["candidates"][0]
    winner["queued_s"] += 100
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (first, second, third)))
    changed = run_here("recompute", str(path))
    assert changed.returncode == 1
    assert f"recorded {winner['worker']} of pool a, recomputed " in changed.stdout
    path.write_text(printed[:-200])
    damaged = run_here("recompute", str(path))
    assert damaged.returncode == 2
    assert damaged.stderr.startswith("slagate: line 3: is not JSON")
    assert "Traceback" not in damaged.stderr


def test_followers_get_new_receipts_and_end_with_the_gateway(tmp_path: Path) -> None:
    with cluster(tmp_path, {"a": Pool("agg", 2)}) as running:
        command = [
            *SLAGATE,
            "receipts",
            "--follow",
            "--insecure",
            "--target",
            running.gateway.admin_address,
        ]
        out = tmp_path / "out"
        with out.open("wb") as file:
            follower = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE)
        try:
            eventually(lambda: out.read_bytes().count(b"\n") == 1, "the configuration is printed")
            with Client(running.gateway.address) as client:
                serve(client, 3)
            eventually(lambda: out.read_bytes().count(b"\n") == 4, "three receipts are printed")
            assert running.gateway.process.terminate() == 0
            _, complaints = follower.communicate(timeout=HANG_S)
        finally:
            follower.kill()
            follower.wait()
        assert (follower.returncode, complaints) == (0, b"")
        assert run_here("recompute", str(out)).returncode == 0


def test_who_has_read_enough_may_leave(agg: Cluster) -> None:
    with Client(agg.gateway.address) as client:
        serve(client, 3)
    command = [
        *SLAGATE,
        "receipts",
        "--follow",
        "--insecure",
        "--target",
        agg.gateway.admin_address,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    try:
        with Client(agg.gateway.address) as client:
            serve(client, 2)
        assert process.wait(timeout=HANG_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_a_gateway_that_is_not_there_is_named() -> None:
    ended = run_here("receipts", "--insecure", "--target", "127.0.0.1:9")
    assert ended.returncode == 1
    assert ended.stderr.startswith("slagate: UNAVAILABLE")
