"""`slagate worker convert`: engine arguments for another role, or another tensor-parallel size."""

import os
from pathlib import Path
from typing import Annotated

import typer

from slagate.router.cli.command import (
    EXIT_FINDINGS,
    check_choice,
    ending_on_usage_error,
    errors,
    fail,
    until_reader_leaves,
)
from slagate.router.cli.worker.engine_args import (
    MAX_RANKS,
    AllowUnknownEngineArgs,
    engine_version_of,
)
from slagate.workers.engine_args.build import assemble
from slagate.workers.engine_args.convert import Conversion
from slagate.workers.engine_args.convert import convert as converted
from slagate.workers.engine_args.model.merge import Layer
from slagate.workers.engine_args.rules.case import IntendedUse
from slagate.workers.engine_args.yaml_text import PEER, read_yaml, yaml_lines

CONVERTED_ROLES = ("agg", "prefill", "decode")


def convert(
    *,
    role: Annotated[str, typer.Option(help="What the file is for: agg, prefill or decode.")],
    extra_engine_args: Annotated[
        Path, typer.Option(metavar="FILE", help="YAML: a file, or a packaged configuration.")
    ],
    to: Annotated[
        str | None, typer.Option(help="What it shall be for; default: what it is for.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, max=MAX_RANKS, help="Tensor parallel size.")
    ] = None,
    peer_engine_args: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="From agg: of the role that the result pairs with."),
    ] = None,
    allow_unknown_engine_args: AllowUnknownEngineArgs = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result here.")] = None,
) -> None:
    """Convert engine arguments to another role or TP size; exit status 1 where the result has errors."""
    for option, value in (("--role", role), ("--to", to)):
        if value is not None:
            check_choice(option, value, CONVERTED_ROLES)
    if to is None and tp is None:
        fail("--to or --tp is missing: what to convert to")
    with ending_on_usage_error():
        peer = None if peer_engine_args is None else read_yaml(peer_engine_args, PEER).values
        conversion = converted(
            read_yaml(extra_engine_args).values, role=role, to=to, tp=tp, peer=peer
        )
    result_role = to or role
    with until_reader_leaves():
        for line in _diff_lines(conversion):
            print(line)
    if out is not None:
        title = f"# For {result_role}, converted from {role} of {extra_engine_args}."
        lines = [title, *yaml_lines(conversion.values)]
        try:
            out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            fail(f"--out: {out}: {error.strerror or error}")
    args = assemble(
        result_role,
        [Layer("converted", conversion.values)],
        wanted=IntendedUse(
            prefix_routing=True,
            engine_version=engine_version_of(None),
            allows_unknown=allow_unknown_engine_args,
            environ=os.environ,
        ),
    )
    for doubt in conversion.doubts:
        errors.print(f"slagate: warning: {doubt}")
    for finding in args.findings:
        errors.print(f"slagate: {finding.severity}: {finding}")
    raise typer.Exit(EXIT_FINDINGS if args.errors else 0)


def _diff_lines(conversion: Conversion) -> list[str]:
    """Each change with its reason in the line below."""
    lines = []
    for change in conversion.changes:
        lines += [str(change), f"      {change.why}"]
    return lines or ["nothing changes"]
