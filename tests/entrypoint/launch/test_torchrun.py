"""torchrun's own records of failures, read as ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.core.console import report_error
from entrypoint.core.errors import PeerLostError
from entrypoint.launch.failures import Failure, first_failure
from entrypoint.launch.torchrun import convert_failures

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
