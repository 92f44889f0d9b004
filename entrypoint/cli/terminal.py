"""How wide and how colored the plan is where it is printed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

from msgspec import Struct

from entrypoint.plan.display import DEFAULT_COLUMNS, plan_lines
from entrypoint.plan.model import Plan

MIN_COLUMNS, MAX_COLUMNS = 60, 140


class Layout(Struct, frozen=True):
    """The columns of a line, and whether colors are shown."""

    columns: int = DEFAULT_COLUMNS
    color: bool = False


def layout_of(stream: TextIO, environ: Mapping[str, str]) -> Layout:
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
    return Layout(columns, not environ.get("NO_COLOR") and (is_forced or can_color))


def plan_text(plan: Plan, stream: TextIO, environ: Mapping[str, str], *, command: bool = False, only: str = "") -> str:
    """Return the plan's lines as they are shown on a stream (see `plan_lines`)."""
    layout = layout_of(stream, environ)
    return "\n".join(plan_lines(plan, command=command, only=only, columns=layout.columns, color=layout.color))
