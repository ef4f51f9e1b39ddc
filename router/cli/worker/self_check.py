"""`slagate worker trtllm --self-check`: the table of what was checked.

Exit status 0: nothing failed, and all was run; 1: otherwise.
"""

import sys
from collections.abc import Sequence

from rich.table import Table

from slagate.router.cli.command import EXIT_FINDINGS, until_reader_leaves
from slagate.router.tables import print_table, stdout_console
from slagate.workers.serving.self_check import CheckRow, run_self_check
from slagate.workers.serving.start import TrtllmOptions
from slagate.workers.serving.trtllm import leave_at_once


async def check_and_show(options: TrtllmOptions) -> int:
    """Run the self-check of a worker with these options and print its table; the exit status."""
    rows, has_ended = await run_self_check(options)
    failed = any(row.result in ("failed", "not run") for row in rows)
    status = EXIT_FINDINGS if failed else 0
    with until_reader_leaves():
        _print_rows(rows, f"{options.served_name}, {options.role}")
    if not has_ended:
        # Threads of the engine would hold the end up.
        sys.stdout.flush()
        leave_at_once(status)
    return status


def _print_rows(rows: Sequence[CheckRow], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("check", "result"):
        table.add_column(name, no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("seen", overflow="fold")
    for row in rows:
        table.add_row(row.what, row.result, f"{row.seconds:.2f}", row.seen)
    print_table(stdout_console(), table)
    for row in rows:
        if row.advice:
            print(f"{row.what} failed: {row.advice}.")
