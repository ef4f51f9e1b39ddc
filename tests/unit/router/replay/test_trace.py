"""Rows of traces: three formats told by their content, odd rows, and what is said about them."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from slagate.proto import gateway_pb2 as gw
from slagate.router.cli.receipts import json_line
from slagate.router.loadgen.trace import TraceError, TraceRequest, load_trace, prompt_tokens
from slagate.router.replay.trace import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    TraceRow,
    arrival_s,
    count_rows,
    digest,
    read_rows,
)

VOCAB_SIZE = 128_256
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def mooncake(
    timestamp: object, isl: object, osl: object, ids: object = None, **extra: object
) -> str:
    row = {"timestamp": timestamp, "input_length": isl, "output_length": osl, "hash_ids": ids}
    return json.dumps({**row, **extra})


class Reader:
    """Reads a file that it writes, and keeps the notes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trace"
        self.notes: list[str] = []

    def read(self, content: str | bytes, *, skip: int = 0, n_rows: int = 3) -> list[TraceRow]:
        self.path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_rows(self.path, skip=skip, n_rows=n_rows, note=self._note)

    def _note(self, text: str) -> None:
        assert text.startswith(f"{self.path}: ")
        self.notes.append(text.removeprefix(f"{self.path}: "))

    def refused(self, content: str | bytes, *, skip: int = 0) -> str:
        with pytest.raises(TraceError) as caught:
            self.read(content, skip=skip)
        return str(caught.value).replace(str(self.path), "FILE")


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


def figures(rows: Sequence[TraceRow]) -> list[tuple[int, float, int, int]]:
    return [(row.number, round(row.time_s, 7), row.isl_tokens, row.osl_tokens) for row in rows]


# --- Mooncake --------------------------------------------------------------------------------------


def test_packaged_sample_reads_as_load_generation_reads_it() -> None:
    notes: list[str] = []
    path = Path(str(files("slagate.configs") / "traces" / "conversation-sample.jsonl"))
    expected = load_trace()
    rows = read_rows(path, skip=0, n_rows=len(expected), note=notes.append)
    assert [
        TraceRequest(row.time_s * 1000, row.isl_tokens, row.osl_tokens, row.hash_ids)
        for row in rows
    ] == expected
    for row, request in zip(rows[:20], expected, strict=False):
        assert np.array_equal(row.prompt(VOCAB_SIZE), prompt_tokens(request, VOCAB_SIZE))
    assert not notes


def test_rows_are_numbered_in_the_file_whatever_is_skipped(reader: Reader) -> None:
    lines = [mooncake(1000 * n, 10 + n, 1, [0]) for n in range(9)]
    rows = reader.read("\n\n".join(lines) + "\n \n", skip=4)
    assert figures(rows) == [(4, 4.0, 14, 1), (5, 5.0, 15, 1), (6, 6.0, 16, 1)]
    assert not reader.notes


def test_no_other_row_is_looked_at_than_those_asked_for(reader: Reader) -> None:
    good = [mooncake(n * 10, 10, 1, [0]) for n in range(4)]
    rows = reader.read("\n".join([good[0], "no JSON", *good[1:], "no JSON"]), skip=2)
    assert [row.number for row in rows] == [2, 3, 4]


def test_fewer_rows_than_asked_for_are_read_with_a_note(reader: Reader) -> None:
    content = "\n".join(mooncake(n, 10, 1, [0]) for n in range(4))
    assert len(reader.read(content, skip=2)) == 2
    assert reader.notes == ["has 4 rows, so 2 in place of 3 are read"]
    assert reader.refused(content, skip=4) == "FILE: has 4 rows, none from row 4 on"


def test_rows_are_counted_without_a_look_at_them(reader: Reader) -> None:
    content = "\n\n".join([mooncake(0, 10, 1), "no JSON", mooncake(9, 10, 1), ""])
    reader.path.write_text(content, encoding="utf-8")
    assert [count_rows(reader.path, most=most) for most in (2, 3, 4)] == [2, 3, 3]
    reader.path.write_text(f"{AZURE}\n\n,,\nsoon,1,1\n", encoding="utf-8")
    assert count_rows(reader.path, most=9) == 1


def test_rows_out_of_order_come_in_order_of_time(reader: Reader) -> None:
    content = "\n".join(mooncake(at, 10 + at, 1, [0]) for at in (7, 2.5, 9))
    rows = reader.read(content.replace("12.5", "12"))
    assert [row.number for row in rows] == [1, 0, 2]
    assert arrival_s(rows, 2.0) == pytest.approx([0.0, 0.00225, 0.00325])
    assert reader.notes == ["rows that come before the one above, and are put in order of time: 1"]


def test_rows_of_one_time_arrive_at_once(reader: Reader) -> None:
    rows = reader.read("\n".join(mooncake(7, 10, 1, [0]) for _ in range(3)))
    assert arrival_s(rows, 0.5) == [0.0, 0.0, 0.0]
    assert reader.notes == ["all rows have one time, so they arrive at once at any load"]


def test_seconds_for_milliseconds_are_pointed_out(reader: Reader) -> None:
    content = "\n".join(mooncake(n * 0.4, 10, 1, [0]) for n in range(101))
    reader.read(content, n_rows=99)
    assert not reader.notes
    reader.read(content, n_rows=101)
    (note,) = reader.notes
    assert note.startswith("2,525 requests arrive in a second")
    assert "load 0.001" in note


def test_empty_prompts_are_left_out_and_empty_answers_are_one_token(reader: Reader) -> None:
    rows = reader.read(
        "\n".join(mooncake(n * 10, n, 4 * (n - 1), [0]) for n in range(3)).replace("-4", "0")
    )
    assert figures(rows) == [(1, 0.01, 1, 1), (2, 0.02, 2, 4)]
    assert reader.notes == [
        "rows left out, as they have no prompt or were refused as wrong: 1",
        "empty answers, which count as one token, the end of text: 1",
    ]
    assert reader.refused(mooncake(0, 0, 1)) == "FILE: none of these 1 rows has a prompt"


def test_what_has_no_block_id_shares_nothing(reader: Reader) -> None:
    long, short = mooncake(0, 1200, 1, [5, 6]), mooncake(10, 1200, 1, [5])
    rows = reader.read("\n".join([long, short, mooncake(20, 1200, 1)]))
    whole, part, none = (row.prompt(VOCAB_SIZE) for row in rows)
    assert [len(each) for each in (whole, part, none)] == [1200] * 3
    assert np.array_equal(whole[:512], part[:512])
    assert not np.array_equal(whole[512:544], part[512:544])
    tails = [each[1024:].tobytes() for each in (whole, part, none)]
    assert len(set(tails)) == 3
    assert not np.array_equal(whole[:32], none[:32])
    assert [row.conversation for row in rows] == [6, 1, 2]
    (note,) = reader.notes
    assert note.startswith("rows with another number of block ids than blocks of 512 tokens")
    assert note.endswith(": 2")


@pytest.mark.parametrize("rounded_up", [True, False])
def test_smaller_blocks_are_found_by_the_number_of_ids(reader: Reader, *, rounded_up: bool) -> None:
    sizes = (100, 1000, 90)
    counts = [-(-isl // 16) if rounded_up else isl // 16 for isl in sizes]
    lines = [
        mooncake(at * 10, isl, 1, list(range(n)))
        for at, (isl, n) in enumerate(zip(sizes, counts, strict=True))
    ]
    rows = reader.read("\n".join(lines))
    assert {row.block_tokens for row in rows} == {16}
    first, second, _ = (row.prompt(VOCAB_SIZE) for row in rows)
    assert np.array_equal(first[:96], second[:96])
    assert reader.notes[-1] == "a block id stands for 16 tokens"


def test_a_few_odd_rows_do_not_change_the_block_size(reader: Reader) -> None:
    lines = [mooncake(at * 10, 1000, 1, [1, 2]) for at in range(3)]
    rows = reader.read("\n".join([*lines[:2], mooncake(30, 100, 1, list(range(7)))]))
    assert {row.block_tokens for row in rows} == {BLOCK_TOKENS}
    assert len(rows[2].prompt(VOCAB_SIZE)) == 100


def test_any_integer_is_an_id(reader: Reader) -> None:
    rows = reader.read("\n".join(mooncake(n * 10, 600, 1, [-1, 2**70]) for n in range(2)), n_rows=2)
    assert [row.conversation for row in rows] == [2**70, 2**70]
    assert np.array_equal(*(row.prompt(VOCAB_SIZE) for row in rows))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON: "),
        ("[1]", "must be an object (got [1])"),
        (mooncake("soon", 1, 1), 'timestamp: must be a number (got "soon")'),
        ('{"timestamp": true}', "timestamp: must be a number (got true)"),
        (mooncake(float("nan"), 1, 1), "timestamp: must be a number (got NaN)"),
        (mooncake(0, 1.5, 1), f"input_length: must be a whole number of tokens from 0 to {MAX_TOKENS}"),
        (mooncake(0, -1, 1), "input_length: must be a whole number"),
        (mooncake(0, 1, MAX_TOKENS + 1), "output_length: must be a whole number"),
        (mooncake(0, 1, None), "output_length: must be a number (got null)"),
        (mooncake(0, 1, 1, "0"), 'hash_ids: must be a list of integers (got "0")'),
        (mooncake(0, 1, 1, [True]), "hash_ids: must be a list of integers (got [true])"),
    ],
)  # fmt: skip
def test_bad_rows_are_named_by_line_and_field(reader: Reader, line: str, problem: str) -> None:
    assert reader.refused(f"{mooncake(0, 1, 1)}\n\n{line}\n").startswith(f"FILE:3: {problem}")


# --- Azure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_azure_rows_have_times_with_7_decimals(reader: Reader, end: str, mark: str) -> None:
    lines = (
        AZURE,
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-16 18:16:00,879,55",
    )
    rows = reader.read(mark + end.join(lines) + 2 * end)
    assert [(row.number, row.isl_tokens, row.osl_tokens) for row in rows] == [
        (0, 374, 44),
        (1, 396, 109),
        (2, 879, 55),
    ]
    assert arrival_s(rows, 1.0) == pytest.approx([0.0, 4.314579, 13.31941], abs=1e-6)
    assert {row.hash_ids for row in rows} == {()}
    assert [row.conversation for row in rows] == [0, 1, 2]
    assert not reader.notes


def test_azure_times_may_have_a_zone(reader: Reader) -> None:
    rows = reader.read(
        f"{AZURE}\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10T01:00:01.5+0100,2399,6\n"
        "2024-05-10 00:00:03Z,76,15\n"
    )
    assert arrival_s(rows, 1.0) == pytest.approx([0.0, 1.49007, 2.99007])


def test_azure_columns_are_found_by_name(reader: Reader) -> None:
    rows = reader.read(
        '"Timestamp","NumImages",GENERATEDTOKENS, ContextTokens ,note\r\n'
        '"2023-11-16 18:15:46.68",2,"44","374.0","a, ""b"" and\r\nc"\r\n'
        ",,,\r\n"
        "2023-11-16 18:15:47,0,7,12\r\n"
    )
    assert [row[0:1] + row[2:4] for row in rows] == [(0, 374, 44), (1, 12, 7)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", "FILE:1: GeneratedTokens: is none of the columns"),
        ("[{}]", "FILE:1: TIMESTAMP: is none of the columns"),
        ("TIMESTAMP,x,y".encode("utf-16"), "FILE:1: is not UTF-8"),
        (f"{AZURE}\n".encode() + b"\xff,1,2", "FILE:2: is not UTF-8"),
        (f"{AZURE}\n2023-13-16 18:15:46,2,3", "FILE:2: TIMESTAMP: must be a date and time"),
        (f"{AZURE}\n1700158546.7,2,3", "FILE:2: TIMESTAMP: must be a date and time"),
        (f"{AZURE}\n\n2023-11-16 18:15:46,2", "FILE:3: GeneratedTokens: must be a number (got null)"),
        (f"{AZURE}\n2023-11-16 18:15:46,many,2", 'FILE:2: ContextTokens: must be a number (got "many")'),
        (f"{AZURE}\n2023-11-16 18:15:46,\"{'x' * 200_000}\",2", "FILE:2: is not CSV: "),
        (AZURE, "FILE: has no row"),
        ("", "FILE: is empty"),
        (" \n\n", "FILE: is empty"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(reader: Reader, content: str | bytes, problem: str) -> None:
    assert reader.refused(content).startswith(problem)


def test_packed_files_are_read(reader: Reader, tmp_path: Path) -> None:
    packed = gzip.compress("\n".join(mooncake(n * 10, 10, 1, [0]) for n in range(3)).encode())
    assert len(reader.read(packed)) == 3
    assert "end-of-stream" in reader.refused(packed[:-12])
    assert reader.refused(packed[:2] + b"junk" * 9).startswith("FILE: ")
    with pytest.raises(TraceError, match=r"none\.csv: No such file or directory"):
        read_rows(tmp_path / "none.csv", skip=0, n_rows=1)
    with pytest.raises(TraceError, match="Is a directory"):
        read_rows(tmp_path, skip=0, n_rows=1)


# --- receipts --------------------------------------------------------------------------------------


def receipt(unix_s: float, total_ms: float, isl: int, osl: int, outcome: str = "completed") -> str:
    return json_line(
        gw.WatchReceiptsResponse(
            receipt=gw.Receipt(
                decision=gw.Decision(isl_tokens=isl),
                actual=gw.Actual(outcome=outcome, output_tokens=osl, total_ms=total_ms),
                unix_s=unix_s,
            )
        )
    )


CONFIG = json_line(gw.WatchReceiptsResponse(config=gw.GatewayConfig(version="1")))


def test_receipts_arrive_when_they_ended_less_what_they_took(reader: Reader) -> None:
    lines = [CONFIG, receipt(1000, 2000, 50, 5), CONFIG, receipt(1001, 9000, 60, 6)]
    rows = reader.read("\n".join([*lines, receipt(1002, 10, 70, 7)]))
    assert figures(rows) == [(1, 992.0, 60, 6), (0, 998.0, 50, 5), (2, 1001.99, 70, 7)]
    assert reader.read("\n".join([*lines, receipt(1002, 10, 70, 7)]), skip=2)[0].isl_tokens == 70


def test_a_request_that_was_not_answered_has_the_usual_length(reader: Reader) -> None:
    lines = [receipt(n, 0, 10, length) for n, length in enumerate((3, 40, 5))]
    failed = [("overloaded", 0), ("worker_failed", 2), ("cancelled", 9)]
    lines += [receipt(9 + n, 0, 10, length, how) for n, (how, length) in enumerate(failed)]
    rows = reader.read("\n".join(lines), n_rows=6)
    assert [row.osl_tokens for row in rows] == [3, 40, 5, 5, 5, 9]
    (note,) = reader.notes
    assert "the median of the others' lengths, 5 tokens" in note
    assert note.endswith(": 3")


def test_a_request_that_was_wrong_is_left_out(reader: Reader) -> None:
    outcomes = Counter(completed=1, invalid=1, too_large=1)
    lines = [receipt(n, 0, 10, 1, how) for n, how in enumerate(outcomes)]
    assert [row.number for row in reader.read("\n".join(lines))] == [0]
    assert reader.notes == ["rows left out, as they have no prompt or were refused as wrong: 2"]
    # Without any answer there is no usual length.
    assert reader.read(receipt(1, 0, 10, 0, "overloaded"))[0].osl_tokens == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"receipt": 1}', "receipt: must be an object (got 1)"),
        ('{"receipt": {"unix_s": 1, "decision": {}}}', "receipt: actual: must be an object (got null)"),
        ('{"receipt": {"decision": {}, "actual": {}}}', "receipt: unix_s: must be a number (got null)"),
        (
            '{"receipt": {"unix_s": 1, "decision": {}, "actual": {"total_ms": "x"}}}',
            'receipt.actual: total_ms: must be a number (got "x")',
        ),
    ],
)  # fmt: skip
def test_bad_receipts_are_named_by_line_and_field(reader: Reader, line: str, problem: str) -> None:
    assert reader.refused(f"{CONFIG}\n{line}\n") == f"FILE:2: {problem}"


def test_a_digest_tells_rows_from_any_others() -> None:
    row = TraceRow(0, 0.5, 600, 3, (7, 8))
    others = [row._replace(time_s=0.25), row._replace(hash_ids=(7, 9)), row._replace(osl_tokens=4)]
    digests = {digest([each]) for each in (row, *others)} | {digest([]), digest([row, row])}
    assert len(digests) == 6
    assert digest([row._replace()]) in digests
