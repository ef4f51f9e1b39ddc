"""`slagate grid show --target` against a real gateway."""

import re
from pathlib import Path

from support.engine.tokens import prompt
from support.gateway.foreign_client import Client, read, request
from support.gateway.processes import Cluster, run_cli, run_here


def n_ended(printed: str) -> int:
    found = re.search(r"Traffic: ([\d,]+) requests have ended", printed)
    assert found, printed
    return int(found[1].replace(",", ""))


def test_a_running_gateway_shows_its_grid_with_its_traffic(agg: Cluster, tmp_path: Path) -> None:
    target = ("--insecure", "--target", agg.gateway.admin_address)
    before = run_here("grid", "show", *target)
    assert before.returncode == 0, before.stderr
    with Client(agg.gateway.address) as client:
        calls = [
            client.start(request(prompt(100, seed=number), 3, request_id=f"r-{number}"), metadata)
            for number, metadata in enumerate(2 * [(("x-slo-ttft-ms", "60000"),), ()])
        ]
        assert not any(read(call).failed for call in calls)
    after = run_cli("grid", "show", *target)
    assert n_ended(after.stdout) == n_ended(before.stdout) + 4
    version = re.search(r"\(version (\w+)\), mode agg: agg", after.stdout)
    assert version, after.stdout
    assert re.search(r"│ 50 to 90|│ 500 to 900", after.stdout)
    svg = tmp_path / "live.svg"
    pictured = run_cli("grid", "show", *target, "--svg", str(svg))
    assert (pictured.returncode, pictured.stderr) == (0, "")
    assert "% of traffic" in svg.read_text()
    assert version[1] in svg.read_text()
