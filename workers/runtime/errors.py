"""The error that a command answers with exit status 2."""


class UsageError(ValueError):
    """An option of a command is wrong, or does not fit what the command meets; the message says which."""
