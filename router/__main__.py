"""Entry point of the `slagate` command: what has to be so before anything else is imported."""

import os


def main() -> None:
    """Entry point of the console script and of `python -m slagate.router`."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Closed by whoever started us: the next file opened would take its number, and its output.
            os.open(os.devnull, os.O_RDWR)
    from slagate.router.cli import cli

    cli()


if __name__ == "__main__":
    main()
