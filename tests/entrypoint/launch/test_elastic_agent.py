"""Ranks that are started again, for real: when, when not, and what is said; and torchrun's agent."""

from __future__ import annotations

import os
import re
import signal

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.launch.torchrun import wait_for_master_agent
from tests.conftest import Entrypoint, needs_two_cores, refusal
from tests.factories import make_machine, make_test_plan
from tests.net import listen_on
from tests.processes import children
from tests.train.given import SMALL
from tests.train.started import Started

TWICE = {"LAUNCH_MAX_RESTARTS": "2"}


@pytest.mark.versions
@pytest.mark.launch
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_restart_script_always_fails_keeps_its_exit_code(entrypoint: Entrypoint, launcher: str) -> None:
    result = entrypoint.run_script(
        "open('starts', 'a').write('x'); raise SystemExit(9)", env=TWICE | {"LAUNCH_LAUNCHER": launcher}
    )
    assert (result.code, (entrypoint.folder / "starts").read_text()) == (9, "xxx")
    said = [line for line in result.err.splitlines() if line.startswith(("entrypoint: restart", "entrypoint: error"))]
    failed = r"rank 0 of this job \(local rank 0, pid \d+\) failed first, with exit code 9"
    for line, form in zip(
        said, (f"restart 1 of 2: {failed}", f"restart 2 of 2: {failed}", f"error: {failed}"), strict=True
    ):
        assert re.fullmatch(f"entrypoint: {form}", line), line


@pytest.mark.launch
def test_restart_killed_rank_restarts_all_and_succeeds(entrypoint: Entrypoint) -> None:
    text = """
        import os, signal, time
        count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
        open(f"rank{rank}", "a").write(str(count))
        if count == 0:
            while rank == "1" and not os.path.exists("rank0"):
                time.sleep(0.05)
            if rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    """
    result = entrypoint.run_script(text, "--nproc-per-node=2", "--oversubscribe=1", env=TWICE).succeeded()
    assert [(entrypoint.folder / f"rank{rank}").read_text() for rank in (0, 1)] == ["01", "01"]
    assert "restart 1 of 2: rank 1 of this job" in result.err


@pytest.mark.launch
@pytest.mark.parametrize(("launcher", "code"), [("local", 2), ("local", 75), ("torchrun", 75)])
def test_restart_not_retryable_code_is_not_restarted(entrypoint: Entrypoint, launcher: str, code: int) -> None:
    assert (
        entrypoint.run_script(
            f"open('starts', 'a').write('x'); raise SystemExit({code})", env=TWICE | {"LAUNCH_LAUNCHER": launcher}
        ).code
        == code
    )
    assert (entrypoint.folder / "starts").read_text() == "x"


@pytest.mark.versions
@pytest.mark.launch
def test_restart_killed_trainer_rank_resumes_from_checkpoint(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_EPOCHS": "30", "TRAIN_TENSORBOARD": "0", "TRAIN_CHECKPOINT_EVERY": "5", "LAUNCH_MAX_RESTARTS": "1"}
    run = Started(entrypoint, SMALL | env)
    run.wait_for("epoch 12/")
    for rank in children(run.process.pid):
        os.kill(rank, signal.SIGKILL)
    out, err = run.ended_with(0)
    assert "restart 1 of 1: rank 0 of this job" in err
    assert re.search(r"resuming from \S+/checkpoint/step-\d+", out)
    assert entrypoint.summary()["epochs"] == 30


RESTARTS = int(os.environ.get("RESTARTS", "20"))


@pytest.mark.slow
@pytest.mark.launch
@needs_two_cores
def test_one_killed_rank_costs_one_restart_each_time(entrypoint: Entrypoint) -> None:
    """Keys that killed ranks leave in a store cost the next start a restart of its own, or stall it."""
    env = {
        "TRAIN_EPOCHS": "6", "TRAIN_BATCH_SIZE": "8", "TRAIN_TENSORBOARD": "0", "LAUNCH_NPROC_PER_NODE": "2",
        "LAUNCH_MAX_RESTARTS": "3",
    }  # fmt: skip
    for number in range(RESTARTS):
        run = Started(entrypoint, env | {"TRAIN_RUN_NAME": f"run{number}"})
        run.wait_for("epoch 2/")
        os.kill(children(run.process.pid)[number % 2], signal.SIGKILL)
        _, err = run.ended_with(0)
        assert re.findall(r"restart (\d) of 3", err) == ["1"]
        assert entrypoint.summary(f"run{number}")["epochs"] == 6


@pytest.mark.seconds
def test_wait_for_master_agent_late_logs_then_raises(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], port: int
) -> None:
    monkeypatch.setattr("entrypoint.core.network.LOG_INTERVAL_S", 0.2)
    monkeypatch.setattr("entrypoint.core.network.RETRY_INTERVAL_S", 0.1)
    environ = {"LAUNCH_NNODES": "1:2", "LAUNCH_NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    refusal(
        wait_for_master_agent,
        make_test_plan(make_machine(2), environ | {"LAUNCH_RENDEZVOUS_TIMEOUT_S": "1"}),
        match=f"node 0 at 127.0.0.1:{port} did not come within 1 s",
        code=ExitCode.RENDEZVOUS,
    )
    assert f"entrypoint: waiting for node 0 at 127.0.0.1:{port} (0 of 1 s)" in capfd.readouterr().err
    with listen_on(port):
        wait_for_master_agent(make_test_plan(make_machine(2), environ))


LISTENING = """
    import os

    agent = os.getppid()
    links = [os.readlink(f"/proc/{agent}/fd/{name}") for name in os.listdir(f"/proc/{agent}/fd")]
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").readlines()[1:]:
            _, address, _, state, *_, = fields = line.split()
            if state == "0A" and f"socket:[{fields[9]}]" in links:
                os.write(1, f"{table} {address.partition(':')[0]}\\n".encode())
"""


@pytest.mark.seconds
@needs_two_cores
def test_agent_of_one_node_listens_on_loopback_alone(entrypoint: Entrypoint) -> None:
    result = entrypoint.run_script(
        LISTENING, "--nproc-per-node=2", "--oversubscribe=1", "--launcher=torchrun"
    ).succeeded()
    assert set(result.out.splitlines()) == {"tcp 0100007F"}
