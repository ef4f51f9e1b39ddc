"""Errors in how a command is used, and what was probably meant by a word that is not known."""

import difflib
import sys
from collections.abc import Iterable


class UsageError(ValueError):
    """A command cannot run as it was called, and ends with status 2; the message names the option."""


class ProfileError(UsageError):
    """A timing profile that cannot be used; the message names the file and the field."""


def nearest(word: str, known: Iterable[str], *, least: float = 0.6) -> str | None:
    """The known word that is most like `word`; None where all are less like it than `least`, 0 to 1.

    >>> nearest("workres", ["workers", "profile"])
    'workers'
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=least)), None)


def unknown_key(key: str, known: Iterable[str], *, least: float = 0.6) -> str:
    """Why a key of a file is refused, with the probable correction.

    >>> unknown_key("workres", ["workers", "profile"])
    'unknown key, did you mean "workers"?'
    """
    near = nearest(key, known, least=least)
    return "unknown key" if near is None else f'unknown key, did you mean "{near}"?'


BINDINGS = "openengine.v1"


def clash_of_bindings(error: TypeError) -> str:
    """Who else has OpenEngine's messages in this process, for the error that came of it; else "".

    Protobuf's default pool takes each message once. Slagate has them in one module, TensorRT-LLM in
    several, and whichever is imported second fails.
    """
    if f"{BINDINGS}." not in str(error):
        return ""
    registered = [
        name
        for name, module in list(sys.modules.items())
        if getattr(getattr(module, "DESCRIPTOR", None), "package", "") == BINDINGS
    ]
    traceback = error.__traceback__
    while traceback is not None:
        failed = str(traceback.tb_frame.f_globals.get("__name__"))
        traceback = traceback.tb_next
    listed = " and ".join(sorted({*registered, failed}))
    return (
        f"{listed} each bring the messages of {BINDINGS}, and one process can have them once: nothing "
        "but slagate may import such a module in a worker (sitecustomize, .pth files, plugins); "
        "TensorRT-LLM does so for its own OpenEngine server only"
    )
