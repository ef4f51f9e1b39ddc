"""How far `slagate bench` is, on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressLine:
    """A line of progress on stderr, or one for each phase where nobody looks on."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def phase(self, what: str, total: float | None) -> None:
        """As `Listener.phase`."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total, state="")
        if not self._bar.console.is_terminal:
            self.note(what)

    def change(self, done: float, state: str) -> None:
        """As `Listener.change`."""
        assert self._task is not None
        self._bar.update(self._task, completed=done, state=state)

    def note(self, text: str) -> None:
        """As `Listener.note`."""
        self._bar.console.print(f"slagate: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def shown() -> Iterator[ProgressLine]:
    """Progress, for the time of the block."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield ProgressLine(bar)
