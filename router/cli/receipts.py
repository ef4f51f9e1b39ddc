"""The commands over receipts: `receipts` reads them from a gateway, `recompute` decides them again."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import ParseDict, ParseError

from slagate.proto import gateway_pb2 as gw
from slagate.router.cli.client import to_dict
from slagate.router.cli.command import EXIT_FAILED, Admin, ending_on_usage_error, run_to_exit
from slagate.router.cli.tls import Insecure, TlsCa, TlsKey, TlsName, TlsOwnCert, dial_tls
from slagate.router.client import admin_at
from slagate.router.receipts.config import RecordedConfig, UnusableReceipt, read_config
from slagate.router.receipts.recompute import decide_again
from slagate.workers.runtime.usage import UsageError
from slagate.workers.tls.files import TlsFiles

MAX_WORDS = 300


def receipts(
    *,
    target: Admin,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with new ones until the gateway ends.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=0, max=2**32 - 1, help="Newest kept ones to begin with; default: all."),
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Print a gateway's configuration and its newest receipts, as JSON lines."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    run_to_exit(lambda: print_receipts(target, tls=tls, follow=follow, limit=limit))


def recompute(
    file: Annotated[Path, typer.Argument(help="What `slagate receipts` printed; - is stdin.")],
) -> None:
    """Decide again what receipts hold, offline; fails where a choice comes out otherwise."""
    with ending_on_usage_error():
        status = recompute_file(str(file))
    raise typer.Exit(status)


async def print_receipts(
    target: str, *, tls: TlsFiles | None, follow: bool, limit: int | None
) -> int:
    """Print the configuration and receipts of a running gateway as JSON Lines; returns the exit status."""
    request = gw.WatchReceiptsRequest(follow=follow, limit=limit)
    async with admin_at(target, tls) as gateway:
        async for response in gateway.WatchReceipts(request):
            print(json_line(response), flush=True)
    return 0


def json_line(response: gw.WatchReceiptsResponse) -> str:
    """A message as one line of JSON, doubles exact; `missed` is left out if it is 0."""
    value = to_dict(response)
    if not response.missed:
        del value["missed"]
    return json.dumps(value, separators=(",", ":"))


class Recomputer:
    """Decides again the receipts in the output of `slagate receipts`, and counts the results."""

    def __init__(self) -> None:
        self.n_receipts = self.n_choices = self.n_mismatches = self.n_missed = 0
        self._configs: dict[str, RecordedConfig] = {}

    @property
    def ok(self) -> bool:
        """Whether there was a choice to decide again, and all came out the same."""
        return self.n_choices > 0 and not self.n_mismatches

    def read(self, lines: Iterable[bytes]) -> Iterator[str]:
        """Yield a text for each choice in these lines that differs. Raises `UsageError` naming the line."""
        n_lines = 0
        for line in lines:
            n_lines += 1
            try:
                if line.strip():
                    yield from self._line(parse_line(line))
            except UnusableReceipt as error:
                raise UsageError(f"line {n_lines}: {error}") from error
        if not n_lines:
            raise UsageError("line 1: there is none, the file is empty")

    def _line(self, response: gw.WatchReceiptsResponse) -> Iterator[str]:
        self.n_missed += response.missed
        if response.HasField("config"):
            rules = read_config(response.config)
            self._configs[rules.version] = rules
            return
        if not response.HasField("receipt"):
            raise UnusableReceipt("must have a config or a receipt")
        if not self._configs:
            raise UnusableReceipt("config: must come before the first receipt")
        receipt = response.receipt
        self.n_receipts += 1
        for mismatch in decide_again(receipt, self._configs):
            self.n_choices += 1
            if mismatch is not None:
                self.n_mismatches += 1
                yield (
                    f"receipt {receipt.number}, {mismatch.request_id!r}, {mismatch.stage}:"
                    f" recorded {mismatch.recorded}, recomputed {mismatch.recomputed}"
                )

    def summary(self) -> str:
        """The counts in words."""
        if not self.n_choices:
            return f"nothing to decide again: {self.n_receipts} receipts without a decision"
        missed = f"; {self.n_missed} receipts were missed by the reader" if self.n_missed else ""
        n_same = self.n_choices - self.n_mismatches
        return (
            f"{self.n_receipts} receipts, {self.n_choices} choices:"
            f" {n_same} agree, {self.n_mismatches} differ{missed}"
        )


def recompute_file(path: str) -> int:
    """Decide again the receipts in a file (`-`: stdin), and print what differs; returns the exit status.

    Raises `UsageError` naming line and field.
    """
    recheck = Recomputer()
    with ExitStack() as stack:
        try:
            lines = sys.stdin.buffer if path == "-" else stack.enter_context(open(path, "rb"))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        for found in recheck.read(lines):
            print(found)
    print(recheck.summary())
    return 0 if recheck.ok else EXIT_FAILED


def parse_line(line: bytes) -> gw.WatchReceiptsResponse:
    """Parse what `json_line` makes. Raises `UnusableReceipt`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnusableReceipt(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnusableReceipt("must be a JSON object")
    try:
        return ParseDict(value, gw.WatchReceiptsResponse())
    except (ParseError, OverflowError, TypeError, ValueError) as error:
        # Each field on the way down adds "Failed to parse x field: "; the reason comes last.
        words = str(error).replace("Failed to parse ", "").replace(" field: ", ": ")
        raise UnusableReceipt(words.splitlines()[0][:MAX_WORDS]) from error
