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
    # gRPC reads it once, when it is imported. Its lines are not JSON, name no listener, and come as fast as
    # anybody connects who is refused; what they say of a refusal, the one refused is told.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from slagate.router.commands import cli

    cli()


if __name__ == "__main__":
    main()
