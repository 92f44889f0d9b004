"""What holds secrets: variables by the last word of their names, and URLs with a password."""

from __future__ import annotations

import re

SECRET_IN_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^@]*:[^@]*@", re.IGNORECASE)
SECRET_WORDS = frozenset(
    {"TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "KEY", "APIKEY", "CREDENTIALS"}
)


def is_secret(name: str) -> bool:
    """Return whether a variable's last word says that it holds a secret; `UCX_IB_PKEY` is another word."""
    return name.upper().rpartition("_")[2] in SECRET_WORDS


def value_to_show(name: str, value: str) -> str:
    """Return the value of a variable for the user, or that it is hidden."""
    return "(hidden)" if is_secret(name) or SECRET_IN_URL.match(value) else value
