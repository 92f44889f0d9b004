"""Which of several failures is told as the first, and the code that the job ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoint.torchrun import first_failure

NOW = 1_800_000_000


def failure(folder: Path, rank: int, exitcode: int, said: str = "", at_ns: int = 0, lost_peer: bool = False) -> object:
    """Return torch's own record of a failure, with the error file that a rank of ours would have left."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = folder / f"{rank}.json"
    if said:
        extra = {"timestamp": str(NOW), "time_ns": NOW * 10**9 + at_ns, "refused": True, "lost_peer": lost_peer}
        path.write_text(json.dumps({"message": {"message": said, "extraInfo": extra}}))
    made = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(path))
    made.timestamp = NOW
    return made


CASES = {
    "the earlier of two in one second": ([(0, 2, "late", 900, False), (1, 2, "early", 100, False)], set(), 2, "early"),
    "a cause before who lost its peer": ([(0, 5, "lost", 1, True), (1, 2, "bad file", 9, False)], set(), 2, "bad file"),
    "a kill before who lost its peer": (
        [(0, 5, "lost", 1, True), (1, -9, "", 0, False)],
        set(),
        5,
        "rank 1 of this job (local rank 1, pid 101) failed first: killed by SIGKILL; the kernel does this when memory"
        " runs out",
    ),
    "not those that the agent ended": (
        [(0, -15, "", 0, False), (1, 7, "", 0, False)],
        {100},
        7,
        "rank 1 of this job (local rank 1, pid 101) failed first, with exit code 7",
    ),
    "not even if it had to kill them": (
        [(0, -9, "", 0, False), (1, 7, "", 0, False)],
        {100},
        7,
        "rank 1 of this job (local rank 1, pid 101) failed first, with exit code 7",
    ),
    "a preempted rank's code is kept": ([(0, 75, "saved", 1, False)], set(), 75, "saved"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_is_told(tmp_path: Path, name: str) -> None:
    rows, ended_by_agent, code, said = CASES[name]
    failures = {row[0]: failure(tmp_path, *row) for row in rows}
    assert first_failure(failures, ended_by_agent) == (said, code)
