"""What the commands of the CLI share: option types, usage errors, exit statuses, lines of findings."""

import itertools
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import anyio
import typer
from rich.console import Console

from slagate.pools.grid.errors import ConfigError
from slagate.proto.http2.goaway import all_closed
from slagate.proto.rpc.address import Address, parse_address
from slagate.router.client import CallFailed
from slagate.router.output import OutputFailed
from slagate.router.request.settings import POLICIES
from slagate.workers.runtime.logs import log_to_stderr
from slagate.workers.runtime.usage import UsageError, nearest

EXIT_FAILED = 1
EXIT_USAGE = 2

errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def fail(message: object) -> NoReturn:
    """Print `message` on stderr, and end the command with the exit status of a usage error."""
    errors.print(f"slagate: {message}")
    raise typer.Exit(EXIT_USAGE)


@contextmanager
def ending_on_usage_error() -> Iterator[None]:
    """Within the `with`, a `ConfigError` or `UsageError` ends the command as `fail` does."""
    try:
        yield
    except (ConfigError, UsageError) as error:
        fail(error)


def parsed_address(text: str) -> Address:
    """Parse an option's HOST:PORT. Raises `BadParameter`."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Within the `with`, print to stdout; if the reader closes the pipe, the `with` ends without an error.

    It is for commands whose status says more than whether they could print.
    """
    try:
        yield
        sys.stdout.flush()
    except OutputFailed as error:
        if not error.reader_left:
            raise


def run_to_exit(
    main_coroutine: Callable[[], Coroutine[Any, Any, int]], *, starts_processes: bool = False
) -> NoReturn:
    """Run the coroutine on uvloop and exit with its status; an error that is no bug is only printed.

    A command that `starts_processes` while gRPC is in use runs on asyncio's own loop, which uses vfork:
    gRPC's threads, and its log, do not react to that.
    """
    use_uvloop = sys.platform != "win32" and not starts_processes

    async def whole() -> int:
        if "grpc.aio" in sys.modules:
            # Otherwise gRPC's thread ends with its last object, and whoever collects that may wait for
            # ever.
            sys.modules["grpc.aio"].init_grpc_aio()
        try:
            return await main_coroutine()
        finally:
            await all_closed()

    try:
        status = anyio.run(whole, backend_options={"use_uvloop": use_uvloop})
    except Exception as error:
        cause: BaseException = error
        # Task groups wrap an error from inside; Python 3.10 has no name for the wrapper.
        while inner := getattr(cause, "exceptions", None):
            cause = inner[0]
        if isinstance(cause, CallFailed):
            errors.print(f"slagate: {cause}")
            raise typer.Exit(EXIT_FAILED) from None
        if isinstance(cause, OutputFailed):
            raise cause from None
        if isinstance(cause, OSError) and cause.filename:
            fail(f"{cause.filename}: {cause.strerror}")
        if isinstance(cause, ConfigError | UsageError | OSError):
            fail(cause)
        raise
    raise typer.Exit(status)


def finite(value: float | None) -> float | None:
    """Refuse nan and infinity, which `float` reads, too. Raises `BadParameter`."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("must be a finite number")
    return value


def whole_numbers(option: str, text: str, *, least: int) -> tuple[int, ...]:
    """The numbers of `--option 1,2,4`, sorted, each once; other text, or one below `least`, is refused."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) >= least for word in words):
        fail(f"{option} must be whole numbers from {least} on with commas between (got {text!r})")
    return tuple(sorted({int(word) for word in words}))


MAX_SECONDS = 1e6


def seconds(about: str, *, least: float = 0.0) -> Any:
    """An option that is a time in seconds."""
    return typer.Option(min=least, max=MAX_SECONDS, callback=finite, help=about)


def host_port(about: str) -> Any:
    """An option that is an address to listen on."""
    return typer.Option(
        parser=parsed_address, metavar="HOST:PORT", help=f"{about} Port 0: the kernel chooses."
    )


def _dialled(text: str) -> str:
    if parsed_address(text).port == 0:
        raise typer.BadParameter(f"{text[:100]!r} has port 0, which is for who listens")
    return text


def server(about: str) -> Any:
    """An option that is an address to call."""
    return typer.Option(parser=_dialled, metavar="HOST:PORT", help=about)


Admin = Annotated[str, server("The gateway's admin listener (slagate serve --admin).")]


def check_writable(option: str, path: Path) -> None:
    """Raise `UsageError` if a file cannot be written: before minutes are spent on its content."""
    try:
        is_there = path.exists()
        with path.open("ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written: {error.strerror}") from error


Policy = Annotated[str, typer.Option(help=f"How workers are chosen: {' or '.join(POLICIES)}.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


def check_apart(listeners: Mapping[str, Address | None]) -> None:
    """End the command if two listeners have one address: the kernel's error would blame another process."""
    for (one, address), (other, same) in itertools.combinations(listeners.items(), 2):
        if address is not None and address == same and address.port:
            fail(f"--{one} and --{other} are both {address}")


def check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """End the command unless the value is one of the choices."""
    if value not in choices:
        fail(f"{option} must be one of {', '.join(choices)} (got {value!r})")


def start_log(level: str, **about: object) -> None:
    """Log to stderr from this level on, with `about` in each line; an unknown level ends the command."""
    try:
        log_to_stderr(level, **about)
    except ValueError:
        fail(f"--log-level must be debug, info, warning or error (got {level!r})")


EXIT_FINDINGS = 1
IgnoredCodes = Annotated[
    list[str] | None, typer.Option(metavar="CODE", help="Leave this one out; repeatable.")
]
FindingsAsJson = Annotated[
    bool, typer.Option("--json", help="A JSON object a line instead of text.")
]
COLUMNS, BRIEF_COLUMNS = 100, 120
"""The width of findings, and of brief ones; less if the terminal is narrower."""


def codes_to_ignore(codes: Iterable[str] | None, known: Iterable[str], *, page: str) -> set[str]:
    """The codes that `--ignore` names. One that is not in `known` ends the command; `page` lists these."""
    ignored = {code.upper() for code in codes or ()}
    for code in sorted(ignored - set(known)):
        near = nearest(code, known, least=0.0)
        fail(f"--ignore must be a code of {page}, such as {near} (got {code!r})")
    return ignored


class ShownFinding(NamedTuple):
    """A finding as a command prints it: as text, or as a JSON object of its `fields`."""

    title: str
    message: str
    """A sentence without its full stop."""
    advice: str
    fields: Mapping[str, str]
    is_brief: bool = False
    """Whether it is a few words after the title, below all others, without a paragraph of its own."""


def print_findings(found: Iterable[ShownFinding], summary: str, *, as_json: bool) -> None:
    """Print findings on stdout: as JSON Lines, or as text with `summary` as the last line."""
    with until_reader_leaves():
        if as_json:
            for each in found:
                print(json.dumps(each.fields, ensure_ascii=False))
            return
        ordered = sorted(found, key=lambda one: one.is_brief)
        for each, following in itertools.zip_longest(ordered, ordered[1:]):
            if each.is_brief:
                text = f"{each.title}  {each.message}; {each.advice}"
                lines = _indented(text, first="", columns=BRIEF_COLUMNS)
            else:
                fix = f"Fix: {each.advice}{'' if each.advice.endswith(('.', '?')) else '.'}"
                lines = [each.title, *_indented(f"{each.message}."), *_indented(fix)]
                lines += [""] if following is None or not following.is_brief else []
            print("\n".join(lines))
        print(summary)


def _indented(text: str, *, first: str = " " * 6, columns: int = COLUMNS) -> list[str]:
    """The text in lines of a page's width, or of a narrower terminal's, below its title."""
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else columns
    return textwrap.wrap(
        text,
        width=min(columns, terminal),
        initial_indent=first,
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
