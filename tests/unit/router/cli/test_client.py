import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.router.cli import client as client_cli
from slagate.router.cli.client import RequestOptions, read_prompt
from slagate.workers.runtime.usage import UsageError


def options(**changes: Any) -> RequestOptions:
    return RequestOptions([1, 2], None, None, None, None, None, None)._replace(**changes)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1,2,3", [1, 2, 3]),
        ("5, 6", [5, 6]),
        ("7", [7]),
        ("1\n2 3,", [1, 2, 3]),
        ("4294967295", [2**32 - 1]),
    ],
)
def test_tokens_are_read_from_the_flag_and_from_a_file(
    text: str, tokens: list[int], tmp_path: Path
) -> None:
    assert read_prompt(text, None) == tokens
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    assert read_prompt(f"@{path}", None) == tokens


@pytest.mark.parametrize(
    "text", ["a", "1,b", "-1", "+1", "1_0", "1.0", "0x1", "4294967296", "\u0661", "9" * 5000]
)
def test_what_is_no_token_id_is_refused_by_flag(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--tokens: .* is not a token id") as caught:
        read_prompt(text, None)
    assert len(str(caught.value)) < 200


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--tokens @.*nowhere: No such file"):
        read_prompt(f"@{tmp_path / 'nowhere'}", None)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="--tokens"):
        read_prompt(f"@{binary}", None)


def test_a_made_up_prompt_has_its_length_and_does_not_repeat() -> None:
    assert read_prompt(None, 0) == []
    tokens = read_prompt(None, 3000)
    assert len(set(tokens)) == len(tokens) == 3000
    assert read_prompt(None, 10) == tokens[:10]


def test_one_of_the_two_flags_is_needed() -> None:
    for flags in ((None, None), ("1", 1)):
        with pytest.raises(UsageError, match="either --tokens or --isl"):
            read_prompt(*flags)


def test_targets_go_out_as_metadata() -> None:
    assert options().metadata() == []
    assert options(ttft_ms=500.0, itl_ms=12.5, priority=-1, objective="chat").metadata() == [
        ("x-slo-ttft-ms", "500.0"),
        ("x-slo-tpot-ms", "12.5"),
        ("openengine-priority", "-1"),
        ("x-gateway-inference-objective", "chat"),
    ]


def test_a_request_has_an_id_of_its_own_and_a_budget_only_when_given() -> None:
    first, second = options().message("m"), options(max_tokens=0).message("m")
    assert first.request_id != second.request_id
    assert not first.stopping.HasField("max_tokens")
    assert second.stopping.HasField("max_tokens")
    assert first.token_ids == oe.TokenIds(ids=[1, 2])


def printed(message: Message, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    client_cli._print_json(message)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_json_has_proto_names_zeros_and_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    pools = gw.ListPoolsResponse(
        pools=[gw.PoolStatus(name="p", stage=gw.STAGE_PREFILL, queued_tokens=2**40)]
    )
    parsed = printed(pools, capsys)
    (pool,) = parsed["pools"]
    assert pool == {
        "name": "p",
        "stage": "STAGE_PREFILL",
        "index": 0,
        "workers": 0,
        "workers_draining": 0,
        "workers_unpaired": 0,
        "workers_ready": 0,
        "inflight": 0,
        "queued_tokens": 2**40,
        "estimator": "",
        "requests_total": 0,
        "retries_total": 0,
        "pool_order": [],
        "spills_total": 0,
    }
    assert (parsed["warnings"], parsed["max_attempts"]) == ([], 0)


def test_json_leaves_out_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    worker = gw.WorkerStatus(worker="w:1", load=oe.LoadInfo(used_kv_blocks=2**40))
    parsed = printed(gw.ListWorkersResponse(workers=[worker]), capsys)
    (only,) = parsed["workers"]
    assert "load_age_ms" not in only
    assert only["load"]["used_kv_blocks"] == 2**40
    receipt = printed(gw.Receipt(actual=gw.Actual(outcome="completed", ttft_ms=0.0)), capsys)
    assert receipt["actual"]["ttft_ms"] == 0.0
    assert "itl_ms" not in receipt["actual"]
