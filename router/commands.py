"""The `slagate` command: which commands there are. Each is imported when it is asked for."""

import gc
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

COMMANDS = {
    "serve": "slagate.router.cli.serve",
    "bench": "slagate.router.cli.tools.bench",
    "receipts": "slagate.router.cli.receipts",
    "recompute": "slagate.router.cli.receipts",
    "reload": "slagate.router.cli.reload",
    "generate": "slagate.router.cli.client_commands",
    "explain": "slagate.router.cli.client_commands",
    "pools": "slagate.router.cli.client_commands",
    "demo": "slagate.router.cli.tools.demo",
    "grid": "slagate.router.cli.grid.commands",
    "profile": "slagate.router.cli.tools.profile",
    "worker": "slagate.router.cli.worker.run",
}
"""In which module a command is, under its own name; in the order of `slagate --help`."""


class _Commands(TyperGroup):
    """Imports and builds a command when it is asked for.

    A process runs one of them; importing what only the others need took a fifth of a worker's start.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """All there are."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None."""
        if cmd_name not in self.commands:
            # For a name that there is not, typer looks through all of them for one that is like it.
            self.commands.update(_built([cmd_name] if cmd_name in COMMANDS else COMMANDS))
        return self.commands.get(cmd_name)


cli = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="SLA-aware global router gateway for TensorRT-LLM.",
)


@cli.callback()
def _without_command() -> None:
    """Without one of its own, typer builds no group."""


def _built(names: Iterable[str]) -> dict[str, Any]:
    group = typer.Typer()
    for name in names:
        command = _imported(name)
        if isinstance(command, typer.Typer):
            group.add_typer(command, name=name)
        else:
            group.command(name)(command)
    return dict(get_group(group).commands)


def _imported(name: str) -> Any:
    # What an import makes stays: to look for garbage in it took a tenth of a start.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(COMMANDS[name]), name)
    finally:
        if was_enabled:
            gc.enable()
