"""Entry point of the `slagate` command: what has to be so before anything else is imported."""

import os
import sys


def main() -> None:
    """Entry point of the console script and of `python -m slagate.router`."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Closed by whoever started us: the next file opened would take its number, and its output.
            os.open(os.devnull, os.O_RDWR)
    # gRPC reads it once, when it is imported. Its lines are not JSON, name no listener, and come as fast as
    # anybody connects who is refused; what they say of a refusal, the one refused is told.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        status = _run()
    except KeyboardInterrupt:  # while modules are imported; later it is typer's
        status = 130  # `INTERRUPTED`, which may not have been imported yet
    raise SystemExit(status)


def _run() -> object:
    """Run the command; its exit status."""
    from slagate.router.commands import cli
    from slagate.router.output import OutputFailed, guard_stdout

    guard_stdout()
    status: object = None
    try:
        try:
            cli()
        except SystemExit as ended:
            status = ended.code
        sys.stdout.flush()
    except OutputFailed as failed:
        if not failed.reader_left:
            sys.stderr.write(f"slagate: {failed}\n")
            status = 1
    return status


if __name__ == "__main__":
    main()
