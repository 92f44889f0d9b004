"""Which of several failures is reported as the first, torchrun's too, and the code that the job ends with."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.console import read_error_record, report_error
from entrypoint.core.errors import ExitCode, PeerLostError
from entrypoint.launch.failures import ERROR_FILE, Failure, first_failure, report_stop
from entrypoint.launch.torchrun import convert_failures

NOW_NS = 1_800_000_000 * 10**9


def word(said: str, at_ns: int, lost_peer: bool = False) -> dict[str, Any]:
    """Return what a rank of ours leaves where it refuses."""
    return {"message": said, "extraInfo": {"time_ns": NOW_NS + at_ns, "refused": True, "lost_peer": lost_peer}}


def failure(rank: int, exitcode: int, more: dict[str, Any] | None = None, ended_by_agent: bool = False) -> Failure:
    return Failure(rank, rank, 100 + rank, exitcode, NOW_NS, ended_by_agent, more or {})


SECOND = "rank 1 of this job (local rank 1, pid 101) failed first"
CASES = {
    "the earlier of two": ([failure(0, 2, word("late", 900)), failure(1, 2, word("early", 100))], 2, "early"),
    "a cause before who lost its peer": (
        [failure(0, 5, word("lost", 1, lost_peer=True)), failure(1, 2, word("bad file", 9))],
        2,
        "bad file",
    ),
    "a kill before who lost its peer": (
        [failure(0, 5, word("lost", 1, lost_peer=True)), failure(1, -9)],
        5,
        f"{SECOND}: killed by SIGKILL; the kernel does this when memory runs out",
    ),
    "not those that the agent ended": (
        [failure(0, -15, ended_by_agent=True), failure(1, 7)],
        7,
        f"{SECOND}, with exit code 7",
    ),
    "not even if it had to kill them": (
        [failure(0, -9, ended_by_agent=True), failure(1, 7)],
        7,
        f"{SECOND}, with exit code 7",
    ),
    "a preempted rank's code is kept": ([failure(0, 75, word("saved", 1))], 75, "saved"),
    "torch's own record of an exception": (
        [failure(1, 1, {"message": "ValueError: mine", "extraInfo": {"py_callstack": "…", "timestamp": "1"}})],
        1,
        f"{SECOND}, with exit code 1",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_first_failure_returns_cause_in_any_order(name: str) -> None:
    failures, code, said = CASES[name]
    assert first_failure(failures) == first_failure(reversed(failures)) == (said, code)


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '"word"', '{"message": "only text"}', '{"other": 1}', "\x00\xff"]
)
def test_read_error_record_invalid_returns_empty(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / ERROR_FILE).write_text(text)
    assert read_error_record(tmp_path / ERROR_FILE) == {}


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ([], 143, "entrypoint: error: stopped by SIGTERM\n"),
        ([5], 143, "entrypoint: error: stopped by SIGTERM\n"),
        ([5, int(ExitCode.PREEMPTED)], 75, "entrypoint: preempted: rank 1's word\n"),
        ([5, int(ExitCode.MACHINE)], 3, "entrypoint: error: rank 1's word\n"),
    ],
)
def test_report_stop_reports_whether_ranks_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], codes: list[int], code: int, said: str
) -> None:
    for rank, one in enumerate(codes):
        file = tmp_path / "attempt_0" / str(rank) / ERROR_FILE
        file.parent.mkdir(parents=True)
        file.write_text(
            json.dumps({"message": {"message": f"rank {rank}'s word", "extraInfo": {"code": one, "refused": one != 5}}})
        )
    assert report_stop(tmp_path, signal.SIGTERM, [-15]) == code
    assert capsys.readouterr().err == said


NOW = 1_800_000_000


def test_convert_failures_reads_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    report_error(PeerLostError("another rank is gone"))
    records = {
        rank: ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file=str(tmp_path / f"{rank}.json"))
        for rank, code in ((0, 5), (1, -9), (2, -15))
    }
    for record in records.values():
        record.timestamp = NOW
    lost, killed, ended = convert_failures(records, {102})
    assert (lost.error_file["message"], lost.extra_info["lost_peer"]) == ("another rank is gone", True)
    assert killed == Failure(1, 1, 101, -9, NOW * 10**9)
    assert ended == Failure(2, 2, 102, -15, NOW * 10**9, ended_by_agent=True)
    assert first_failure([lost, ended, killed])[0].startswith("rank 1 of this job (local rank 1, pid 101) failed first")
