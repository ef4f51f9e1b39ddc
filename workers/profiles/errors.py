"""The error of a timing profile that cannot be used."""


class ProfileError(ValueError):
    """A profile that cannot be used; the text names the file and the field."""
