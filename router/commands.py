"""The `slagate` command and its table of commands, each of which is imported when it is called."""

import gc
import platform
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group
from typing_extensions import override

COMMANDS = {
    "serve": "slagate.router.cli.serve",
    "bench": "slagate.router.cli.tools.bench",
    "receipts": "slagate.router.cli.receipts",
    "recompute": "slagate.router.cli.receipts",
    "reload": "slagate.router.cli.client",
    "admission": "slagate.router.cli.client",
    "generate": "slagate.router.cli.client",
    "explain": "slagate.router.cli.client",
    "pools": "slagate.router.cli.client",
    "replay": "slagate.router.cli.tools.replay",
    "demo": "slagate.router.cli.tools.demo",
    "grid": "slagate.router.cli.grid.commands",
    "profile": "slagate.router.cli.tools.profile",
    "worker": "slagate.router.cli.worker.run",
}
"""The module of each command, where it has its own name; in the order of `slagate --help`."""


class _Commands(TyperGroup):
    """A group that imports and builds a command only when it is called, so that each starts faster."""

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            # For an unknown name typer looks for similar ones among all commands.
            self.commands.update(_built([cmd_name] if cmd_name in COMMANDS else COMMANDS))
        return self.commands.get(cmd_name)


cli = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut names of options in a terminal of 80 columns
    help="SLA-aware global router gateway for TensorRT-LLM.",
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it
    if wanted:
        from importlib.metadata import version

        python = f"Python {platform.python_version()}"
        print(f"slagate {version('slagate')} ({python}, {platform.platform()})")
        raise typer.Exit


@cli.callback()
def _without_command(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Take the options of `slagate` itself. Without a callback typer builds no group."""


def _built(names: Iterable[str]) -> dict[str, Any]:
    group = typer.Typer(rich_markup_mode=None)
    for name in names:
        command = _imported(name)
        if isinstance(command, typer.Typer):
            group.add_typer(command, name=name)
        else:
            group.command(name)(command)
    commands = dict(get_group(group).commands)
    _show_whole_sentences(commands)
    return commands


def _show_whole_sentences(commands: dict[str, Any]) -> None:
    """Have lists of commands show the first sentence of each, which typer would cut in the middle."""
    for command in commands.values():
        command.short_help = (command.help or "").partition("\n\n")[0]
        _show_whole_sentences(getattr(command, "commands", {}))


def _imported(name: str) -> Any:
    # Objects made by imports stay alive: looking for garbage among them took a tenth of a start.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(COMMANDS[name]), name)
    finally:
        if was_enabled:
            gc.enable()
