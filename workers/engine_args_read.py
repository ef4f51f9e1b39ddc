"""Engine arguments as an operator writes them: a YAML file, and an override as JSON."""

from pathlib import Path
from typing import Any

import yaml

from slagate.workers.errors import UsageError

EXTRA = "--extra-engine-args"
OVERRIDE = "--override-engine-args"


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `UsageError` naming option, file, and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{EXTRA}: {path} cannot be read: {error}") from error
    value = yaml.safe_load(text)
    if not isinstance(value, dict):
        raise UsageError(f"{EXTRA}: {path} must be a mapping")
    return value


def read_override(text: str) -> dict[str, Any]:
    """The object in `--override-engine-args`. Raises `UsageError`."""
    value = yaml.safe_load(text)
    if not isinstance(value, dict):
        raise UsageError(f"{OVERRIDE} must be a JSON object")
    return value
