"""Any command line ends with a documented exit code and lines of the entrypoint: no traceback, and no hang.

COMMAND_LINES says how many cases are tried.
`python -m tests.entrypoint.cli.command_lines FIRST COUNT` tries any others.
"""

from __future__ import annotations

import os

import pytest

from tests.entrypoint.cli.command_lines import make_case, run_as_process

COUNT, SHARE = int(os.environ.get("COMMAND_LINES", "40")), 20


@pytest.mark.launch
@pytest.mark.generated
@pytest.mark.parametrize("first", range(0, COUNT, SHARE))
def test_command_lines_end_as_documented(first: int) -> None:
    for number in range(first, min(first + SHARE, COUNT)):
        case = make_case(number)
        assert run_as_process(case) == [], case
