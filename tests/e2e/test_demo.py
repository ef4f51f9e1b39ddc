"""`slagate demo --serve`: the demo's fleet, for whoever asks it."""

import csv
import json
from pathlib import Path

from slagate.pools.fleet_file.load import load_config
from support.gateway.processes import run_cli, starting

REPOSITORY = Path(__file__).parents[2]


def test_the_demos_fleet_is_there_for_a_bench_until_it_is_told_to_end(tmp_path: Path) -> None:
    out, figures = tmp_path / "build" / "demo.json", tmp_path / "bench.csv"
    arguments = ["demo", "--serve", "--transport", "shm", "--grid-alone", "--out", str(out)]
    with starting("demo", arguments, tmp_path) as demo:
        demo.wait_ready()  # nine processes start
        fleet = ("--target", demo.ready["listen"], "--admin", demo.ready["admin"], "--insecure")
        assert all(f" {demo.ready[name]} " in demo.stderr() for name in ("listen", "admin"))
        assert f"curl http://{demo.ready['http']}/metrics\n" in demo.stderr()
        few = ("--concurrency", "1,2", "--requests", "2", "--isl", "64", "--osl", "4")
        ended = run_cli("bench", *fleet, *few, "--csv", str(figures))
        assert ended.returncode == 0, ended.stderr
        assert demo.terminate() == 0
        assert demo.rest_of_stdout() == b""
    with figures.open(newline="") as file:
        rows = [(row["answered"], row["shares"], row["share"]) for row in csv.DictReader(file)]
    assert rows == [("2", "8", "worker")] * 2
    used = json.loads(out.with_name("demo-fleet.json").read_text())
    assert used["scheduling"] == {"spill": "none", "admission": "off"}
    packaged = load_config(REPOSITORY / "configs" / "grids" / "demo.json")
    assert {name: len(pool["workers"]) for name, pool in used["pools"].items()} == {
        name: pool.replicas for name, pool in packaged.pools.items()
    }
    assert not out.exists(), "nothing was replayed"


def test_what_is_served_is_not_replayed() -> None:
    ended = run_cli("demo", "--serve", "--requests", "5")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--requests: --serve replays nothing" in ended.stderr
