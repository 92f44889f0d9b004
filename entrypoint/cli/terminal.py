"""How wide and how colored the plan is where it is printed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

from entrypoint.plan.display import DEFAULT_COLUMNS, Layout

MIN_COLUMNS, MAX_COLUMNS = 60, 140


def layout_of(stream: TextIO, environ: Mapping[str, str], *, verbose: bool = False) -> Layout:
    """Return the layout of a terminal; what is no terminal has a width of its own, and no color unless it is forced.

    COLUMNS, NO_COLOR (no-color.org) and CLICOLOR_FORCE (bixense.com/clicolors) are the user's.
    """
    is_terminal, columns = stream.isatty(), DEFAULT_COLUMNS
    if is_terminal:
        asked = environ.get("COLUMNS", "")
        try:
            columns = int(asked) if asked.isdecimal() else os.get_terminal_size(stream.fileno()).columns
        except OSError:  # it has no size
            columns = DEFAULT_COLUMNS
        columns = min(MAX_COLUMNS, max(MIN_COLUMNS, columns or DEFAULT_COLUMNS))
    is_forced = environ.get("CLICOLOR_FORCE", "0") not in ("", "0")
    can_color = is_terminal and environ.get("TERM", "dumb") != "dumb"
    return Layout(columns, not environ.get("NO_COLOR") and (is_forced or can_color), verbose)
