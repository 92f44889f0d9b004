"""What the doctor says of an environment that has the launcher."""

from __future__ import annotations

import sys
from pathlib import Path

from entrypoint.doctor.report import PTH_FILE, check_installation
from tests.conftest import script


def test_clean_environment_has_no_warning(tmp_path: Path) -> None:
    (tmp_path / PTH_FILE).touch()
    assert list(check_installation({}, tmp_path)) == []


def test_what_may_mislead_is_named(tmp_path: Path) -> None:
    (tmp_path / "entrypoint").mkdir()
    script(tmp_path / "entrypoint", "__init__.py", "")
    (tmp_path / "active/bin").mkdir(parents=True)
    (tmp_path / "active/bin/python").symlink_to(sys.executable)
    checks = list(check_installation({"VIRTUAL_ENV": str(tmp_path / "active")}, tmp_path))
    assert [check.what for check in checks] == ["package entrypoint", "interpreter", PTH_FILE]
    assert f"{tmp_path}/entrypoint/__init__.py" in checks[0].seen
    assert f"{tmp_path}/active/bin/python, the active environment" in checks[1].seen
    assert {check.state for check in checks} == {"warning"}
