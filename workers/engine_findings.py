"""What is found wrong, or doubtful, with engine arguments: a stable code, where, what, and what to do."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One thing to look at; with an error the engine does not start, or does not work."""

    code: str
    severity: Literal["error", "warning"]
    key: str
    """Dotted, as in `kv_cache_config.dtype`."""
    text: str
    advice: str

    @property
    def is_error(self) -> bool:
        """Whether an engine must not be started with it."""
        return self.severity == "error"

    def __str__(self) -> str:
        return f"{self.code} {self.key}: {self.text}; {self.advice}"
