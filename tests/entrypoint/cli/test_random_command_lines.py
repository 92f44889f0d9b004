"""Any command line ends with a documented exit code and lines of the entrypoint: no traceback, and no hang.

COMMAND_LINES says how many cases are tried, from the number COMMAND_LINES_FROM on.
"""

from __future__ import annotations

import os

import pytest

from tests.entrypoint.cli.command_lines import make_case, run_as_process

FIRST, COUNT = int(os.environ.get("COMMAND_LINES_FROM", "0")), int(os.environ.get("COMMAND_LINES", "40"))
SHARE = 20


@pytest.mark.launch
@pytest.mark.generated
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, SHARE))
def test_command_lines_end_as_documented(first: int) -> None:
    for number in range(first, min(first + SHARE, FIRST + COUNT)):
        case = make_case(number)
        assert run_as_process(case) == [], case
