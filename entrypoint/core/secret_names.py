"""Names of variables that hold secrets, by their last word."""

from __future__ import annotations

SECRET_WORDS = frozenset(
    {"TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "KEY", "APIKEY", "CREDENTIALS"}
)


def is_secret(name: str) -> bool:
    """Return whether a variable's last word says that it holds a secret; `UCX_IB_PKEY` is another word."""
    return name.upper().rpartition("_")[2] in SECRET_WORDS


def value_to_show(name: str, value: str) -> str:
    """Return the value of a variable for the user, or that it is hidden."""
    return "(hidden)" if is_secret(name) else value
