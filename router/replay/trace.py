"""The rows of a trace, whose format its content shows.

    Mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids
    Azure       CSV of its public LLM traces: TIMESTAMP (date and time), ContextTokens, GeneratedTokens
    receipts    what `slagate receipts` prints

The file may be packed by gzip. It is read up to the last row that is asked for. A row's prompt is made of
its block ids as `router/loadgen` makes it; what no id stands for shares nothing with any other prompt.
"""

import csv
import json
import math
import re
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from gzip import GzipFile
from hashlib import blake2b
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slagate.pools.grid.json_text import shown
from slagate.router.loadgen.trace import BLOCK_TOKENS, TraceError, splitmix64
from slagate.router.request.errors import Outcome

MAX_TOKENS = 10_000_000
"""Of a prompt or an answer: ten times the longest context window there is."""

BLOCK_SIZES = (BLOCK_TOKENS, 16, 32, 64, 128, 256)
"""Tokens that one block id may stand for: other traces in Mooncake's format have smaller blocks."""

FAST_PER_S, MANY_ROWS = 1000.0, 100
"""So many requests a second, of at least so many rows, point to another unit of time."""

_OWN = 1 << 63
"""Added to the number of a row, to seed what has no block id: block ids are small numbers."""

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)? ?(?:Z|([+-]\d\d):?(\d\d))?", re.ASCII | re.I
)
_WRONG = frozenset({Outcome.INVALID.value, Outcome.TOO_LARGE.value})


class TraceRow(NamedTuple):
    """One request of a trace."""

    number: int  # its place in the file, from 0
    time_s: float  # from any fixed point of time
    isl_tokens: int
    osl_tokens: int  # of the true answer
    hash_ids: tuple[int, ...] = ()  # one for each block of the prompt; empty: not known
    block_tokens: int = BLOCK_TOKENS  # that one id stands for

    @property
    def conversation(self) -> int:
        """The second block id, as the first is often of a system prompt; without one, the row's number."""
        return self.hash_ids[1] if len(self.hash_ids) > 1 else self.number

    def prompt(self, vocab_size: int) -> npt.NDArray[np.uint32]:
        """The prompt's tokens, u32[isl_tokens], each below `vocab_size`."""
        ids = [number % (1 << 64) for number in self.hash_ids]
        words = splitmix64(ids, self.block_tokens).reshape(-1)[: self.isl_tokens]
        n_own = self.isl_tokens - len(words)
        if n_own:
            own = splitmix64([_OWN + self.number], n_own).reshape(-1)
            words = np.concatenate([words, own])
        tokens: npt.NDArray[np.uint32] = (words % np.uint64(vocab_size)).astype(np.uint32)
        return tokens


class _Parsed(NamedTuple):
    """A row as it is in the file. A prompt of 0 tokens is none that can be sent."""

    time_s: float
    isl_tokens: int
    osl_tokens: int
    hash_ids: tuple[int, ...] = ()
    is_answered: bool = True  # else the true answer has `osl_tokens` or more


class _Format(NamedTuple):
    """How to read a file: its rows with their line numbers, and what one of them says."""

    rows: Iterator[tuple[int, Any]]
    parse: Callable[[Any, str], _Parsed]


def read_rows(
    path: str | Path, *, skip: int, n_rows: int, note: Callable[[str], None] = lambda _: None
) -> list[TraceRow]:
    """Rows `skip` to `skip + n_rows` of the trace at `path`, in order of time. Raises `TraceError`.

    `note` is called with what was not taken as it stands: rows left out (those without a prompt), numbers
    that were put in the place of others, fewer rows than asked for.
    """
    found: list[tuple[int, _Parsed]] = []
    n_seen = 0
    with _opened(path) as file:
        read = _format_of(_lines(file, str(path)), str(path))
        for line, row in read.rows:
            if n_seen >= skip:
                found.append((n_seen, read.parse(row, f"{path}:{line}")))
            n_seen += 1
            if len(found) == n_rows:
                break
    if not found:
        why = f"has {n_seen} rows, none from row {skip} on" if n_seen else "has no row"
        raise TraceError(f"{path}: {why}")
    if len(found) < n_rows:
        note(f"{path}: has {n_seen} rows, so {len(found)} in place of {n_rows} are read")
    rows, notes = _usable(found)
    if not rows:
        raise TraceError(f"{path}: none of these {len(found)} rows has a prompt")
    for text in (*notes, *_odd_times(rows)):
        note(f"{path}: {text}")
    return sorted(rows, key=lambda row: row.time_s)


def count_rows(path: str | Path, *, most: int) -> int:
    """How many rows the trace at `path` has, up to `most`; they are not looked at. Raises `TraceError`."""
    with _opened(path) as file:
        read = _format_of(_lines(file, str(path)), str(path))
        return sum(1 for _ in islice(read.rows, most))


def digest(rows: Sequence[TraceRow]) -> str:
    """What tells these rows from those of another trace of the same name."""
    return blake2b(repr(rows).encode(), digest_size=16).hexdigest()


def arrival_s(rows: Sequence[TraceRow], load: float) -> list[float]:
    """When each row arrives, from the first one on; at load 1 as fast as in the trace."""
    return [(row.time_s - rows[0].time_s) / load for row in rows]


def _usable(found: Sequence[tuple[int, _Parsed]]) -> tuple[list[TraceRow], list[str]]:
    """The rows that can be replayed, in the order of the file, and notes about the others."""
    sent = [(number, row) for number, row in found if row.isl_tokens]
    block_tokens = _block_tokens([row for _, row in sent])
    known = [row.osl_tokens for _, row in sent if row.is_answered]
    typical = round(statistics.median(known)) if known else 1
    rows = [
        TraceRow(
            number,
            row.time_s,
            row.isl_tokens,
            max(1, row.osl_tokens if row.is_answered else max(row.osl_tokens, typical)),
            row.hash_ids,
            block_tokens,
        )
        for number, row in sent
    ]
    n_cut = sum(len(row.hash_ids) not in (0, -(-row.isl_tokens // block_tokens)) for _, row in sent)
    counts = {
        "rows left out, as they have no prompt or were refused as wrong": len(found) - len(sent),
        "empty answers, which count as one token, the end of text": known.count(0),
        "requests that were not answered to the end, whose answers are taken to have the median of the"
        f" others' lengths, {typical} tokens, or as many as came": len(sent) - len(known),
        f"rows with another number of block ids than blocks of {block_tokens} tokens; what has no id"
        " shares nothing": n_cut,
    }
    notes = [f"{text}: {n}" for text, n in counts.items() if n]
    if block_tokens != BLOCK_TOKENS:
        notes.append(f"a block id stands for {block_tokens} tokens")
    return rows, notes


def _block_tokens(rows: Sequence[_Parsed]) -> int:
    """The block size that most rows' numbers of ids fit, with or without one for a partial block."""

    def n_fitting(size: int) -> int:
        fit = (
            row.isl_tokens // size <= len(row.hash_ids) <= -(-row.isl_tokens // size)
            for row in rows
        )
        return sum(fit)

    return max(BLOCK_SIZES, key=n_fitting)


def _odd_times(rows: Sequence[TraceRow]) -> Iterator[str]:
    """Notes about times of rows, which are in the order of the file."""
    times = [row.time_s for row in rows]
    n_early = sum(later < sooner for sooner, later in pairwise(times))
    span_s = max(times) - min(times)
    if n_early:
        yield f"rows that come before the one above, and are put in order of time: {n_early}"
    if len(rows) > 1 and not span_s:
        yield "all rows have one time, so they arrive at once at any load"
    elif len(rows) >= MANY_ROWS and len(rows) > FAST_PER_S * span_s:
        yield (
            f"{len(rows) / span_s:,.0f} requests arrive in a second; should its times be in seconds, not"
            " in milliseconds, then load 0.001 is its own speed"
        )


@contextmanager
def _opened(path: str | Path) -> Iterator[Iterable[bytes]]:
    """The file, unpacked. Raises `TraceError` where it cannot be read, also within the `with`."""
    try:
        with open(path, "rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            yield GzipFile(fileobj=file) if packed else file
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _lines(file: Iterable[bytes], source: str) -> Iterator[tuple[int, str]]:
    """All lines but blank ones, with their numbers from 1 on."""
    for number, line in enumerate(file, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise TraceError(f"{source}:{number}: is not UTF-8") from None
        if text.strip():
            yield number, text


def _format_of(lines: Iterator[tuple[int, str]], source: str) -> _Format:
    """The format that the first line shows. Raises `TraceError`."""
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{source}: is empty")
    number, text = first
    whole = chain([first], lines)
    if not text.lstrip().startswith("{"):
        return _Format(_table(whole, source), _azure)
    if {"config", "receipt"} & _object(text, f"{source}:{number}").keys():
        return _Format(_receipts(whole, source), _receipt)
    return _Format(whole, _mooncake)


def _mooncake(line: str, where: str) -> _Parsed:
    row = _object(line, where)
    ids = row.get("hash_ids")
    if ids is None:
        ids = []
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise TraceError(f"{where}: hash_ids: must be a list of integers (got {shown(ids)})")
    return _Parsed(
        _number(row, "timestamp", where) / 1000,
        _tokens(row, "input_length", where),
        _tokens(row, "output_length", where),
        tuple(ids),
    )


def _table(lines: Iterator[tuple[int, str]], source: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file as objects with the keys of `_COLUMNS`; capitals of a header do not count."""
    line = 0

    def texts() -> Iterator[str]:
        nonlocal line
        for number, text in lines:
            line = number
            yield text

    reader = csv.reader(texts())
    try:
        header = [name.strip().lower() for name in next(reader)]
        missing = [name for name in _COLUMNS if name.lower() not in header]
        if missing:
            raise TraceError(
                f"{source}:{line}: {missing[0]}: is none of the columns. A trace is Mooncake's JSON lines,"
                f" a CSV file with the columns {', '.join(_COLUMNS)}, or what slagate receipts prints"
            )
        places = [header.index(name.lower()) for name in _COLUMNS]
        for cells in reader:
            row = {
                name: cells[at].strip()
                for name, at in zip(_COLUMNS, places, strict=True)
                if at < len(cells)
            }
            if any(row.values()):
                yield line, row
    except csv.Error as error:
        raise TraceError(f"{source}:{line}: is not CSV: {error}") from None


def _azure(row: Mapping[str, str], where: str) -> _Parsed:
    """`TIMESTAMP` is in UTC where it names no other zone; it has 7 decimals in the traces of 2023."""
    text = row.get("TIMESTAMP", "")
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        date, time, decimals, hours, minutes = match.groups()
        zone = f"{hours}:{minutes}" if hours else "+00:00"
        whole_s = datetime.fromisoformat(f"{date}T{time}{zone}").timestamp()
    except ValueError:
        says = "must be a date and time, such as 2023-11-16 18:15:46.6805900"
        raise TraceError(f"{where}: TIMESTAMP: {says} (got {shown(text)})") from None
    return _Parsed(
        whole_s + float(f"0{decimals or ''}"),
        _tokens(row, "ContextTokens", where),
        _tokens(row, "GeneratedTokens", where),
    )


def _receipts(
    lines: Iterator[tuple[int, str]], source: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, text in lines:
        line = _object(text, f"{source}:{number}")
        if "receipt" in line:
            yield number, _part(line, "receipt", f"{source}:{number}")


def _receipt(receipt: Mapping[str, Any], where: str) -> _Parsed:
    """It arrived when it ended less what it took. One refused as wrong is no work for any fleet."""
    decision, actual = (
        _part(receipt, name, f"{where}: receipt") for name in ("decision", "actual")
    )
    outcome = actual.get("outcome")
    of_actual = f"{where}: receipt.actual"
    isl_tokens = _tokens({"isl_tokens": 0, **decision}, "isl_tokens", f"{where}: receipt.decision")
    return _Parsed(
        _number(receipt, "unix_s", f"{where}: receipt")
        - _number(actual, "total_ms", of_actual) / 1000,
        0 if outcome in _WRONG else isl_tokens,
        _tokens(actual, "output_tokens", of_actual),
        is_answered=outcome == Outcome.COMPLETED.value,
    )


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(f"{where}: must be an object (got {shown(value)})")
    return value


def _part(of: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = of.get(name)
    if not isinstance(value, dict):
        raise TraceError(f"{where}: {name}: must be an object (got {shown(value)})")
    return value


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    """A finite number, which may be in quotes."""
    value = row.get(name)
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise TraceError(f"{where}: {name}: must be a number (got {shown(value)})") from None
    return number


def _tokens(row: Mapping[str, Any], name: str, where: str) -> int:
    number = _number(row, name, where)
    if not (number.is_integer() and 0 <= number <= MAX_TOKENS):
        says = f"must be a whole number of tokens from 0 to {MAX_TOKENS}"
        raise TraceError(f"{where}: {name}: {says} (got {shown(row[name])})")
    return int(number)
