"""A run that goes on while something happens to it."""

from __future__ import annotations

import signal
import subprocess

from entrypoint.core.errors import ExitCode
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment


class Started:
    """The trainer as a user starts it, its output read line by line; `before` are words in front of the command.

    Unless a test sets it, the grace period is long: a machine with other work may need minutes to save a checkpoint.
    """

    def __init__(self, entrypoint: Entrypoint, env: dict[str, str], *before: str) -> None:
        more = {"LAUNCH_QUIET": "1", "LAUNCH_GRACE_PERIOD_S": str(LAUNCH_LIMIT_S)}
        self.process = subprocess.Popen(
            [*before, PYTHON, "-m", "entrypoint", "train"],
            cwd=entrypoint.folder,
            env={**clean_environment(), **more, **env, "HOME": str(entrypoint.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, words: str) -> None:
        """Read on to a line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return
        raise AssertionError(self.process.communicate()[1])

    def ended(self, within_s: float = LAUNCH_LIMIT_S) -> tuple[int, str, str]:
        """Return code, the rest of standard output, and standard error when it has ended, which it must."""
        try:
            out, err = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.process.communicate()[1]) from None
        assert "Traceback" not in err, err
        return self.process.returncode, out, err

    def ended_with(self, code: int) -> tuple[str, str]:
        """Return the rest of standard output, and standard error when it has ended, which it must with this code."""
        found, out, err = self.ended()
        assert found == code, err
        return out, err

    def preempted(self) -> None:
        """Stop it by SIGTERM, at which it must save."""
        self.process.send_signal(signal.SIGTERM)
        self.ended_with(ExitCode.PREEMPTED)
