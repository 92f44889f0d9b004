"""`entrypoint init` writes a file of settings that changes nothing until the user does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from entrypoint.cli.command_table import all_groups
from entrypoint.cli.commands.init import settings_file
from entrypoint.cli.config_file import read_config
from entrypoint.core.settings_base import describe_settings, read_settings
from tests.conftest import Entrypoint


def test_file_has_the_basic_settings_with_their_defaults(tmp_path: Path) -> None:
    groups = all_groups()
    text = settings_file("run.toml")
    (tmp_path / "run.toml").write_text(text)
    assert read_config(tmp_path / "run.toml", groups) == {}, "all are comments"
    (tmp_path / "run.toml").write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    variables = read_config(tmp_path / "run.toml", groups)
    for table in ("train", "launch"):
        basic = {about.variable for about in describe_settings(groups[table]) if about.is_basic}
        assert basic <= set(variables)
        assert read_settings(groups[table], variables, {}).values == groups[table](), "they are the defaults"
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.launch
def test_command_writes_once(entrypoint: Entrypoint) -> None:
    assert entrypoint("init", "mine.toml").out.endswith("then: entrypoint train --config mine.toml\n")
    assert entrypoint("plan", "--config", "mine.toml").code == 0
    again = entrypoint("init", "mine.toml")
    assert (again.code, again.err) == (
        2,
        "entrypoint: error: init mine.toml: is there already. Name another file.\n",
    )
    assert entrypoint("init", "no/such/folder.toml").code == 3
