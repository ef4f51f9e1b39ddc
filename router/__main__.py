"""Entry point of the `slagate` command: what must be set before anything else is imported."""

import os
import sys


def main() -> None:
    """Entry point of the console script and of `python -m slagate.router`."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Our parent closed it: the next file opened would take this number, and get its output.
            os.open(os.devnull, os.O_RDWR)
    # gRPC reads this once, when it is imported. Its lines are not JSON, do not name the listener, and come
    # as often as anybody connects and is refused; that client is told the reason anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        status = _run()
    except KeyboardInterrupt:  # while modules are imported; later typer catches it
        status = 130  # `INTERRUPTED` of router/output.py, which may not be imported yet
    except TypeError as error:  # while modules are imported, too
        from slagate.workers.runtime.usage import clash_of_bindings

        if not (clash := clash_of_bindings(error)):
            raise
        sys.stderr.write(f"slagate: {clash}\n")
        status = 2
    raise SystemExit(status)


def _run() -> object:
    """Run the command, and return its exit status."""
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
