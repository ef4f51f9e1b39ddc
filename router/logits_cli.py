"""The options of `slagate worker` for logits processors."""

from collections.abc import Sequence
from typing import Annotated

import typer

from slagate.router.command import fail
from slagate.workers.errors import UsageError
from slagate.workers.logits import LogitsProcessors, wanted_of

LogitsProcessorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logits-processor",
        metavar="NAME[=JSON]",
        help="Process the logits of every request with this, and these parameters; repeatable.",
    ),
]
AllowLogitsProcessor = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-logits-processor",
        metavar="NAME",
        help="Requests may ask for this one in extra.logits_processors; repeatable.",
    ),
]


def read_logits_processors(
    every: Sequence[str] | None, allowed: Sequence[str] | None
) -> LogitsProcessors:
    """What these options say; a wrong one ends the command."""
    try:
        return LogitsProcessors([wanted_of(text) for text in every or ()], allowed or ())
    except UsageError as error:
        fail(error)
