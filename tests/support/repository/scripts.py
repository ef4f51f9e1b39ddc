"""Stand-ins for the tools of scripts, and pages of what they start."""

import shutil
import urllib.error
import urllib.request
from pathlib import Path

from support.limits import HANG_S

BASH = shutil.which("bash") or ""


def http(address: str, path: str) -> tuple[int, str]:
    """Status and body of `GET path`."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=HANG_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def tool(path: Path, script: str) -> None:
    """A command of this name that does this."""
    path.write_text(f"#!{BASH}\n{script}\n")
    path.chmod(0o755)
