"""When a run saves during its epochs, and ends early to go on later."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import CORES, Entrypoint, needs_two_cores, script
from tests.train.given import SMALL, TWO_RANKS
from tests.train.started import Started

pytestmark = pytest.mark.launch
RUN = SMALL | {
    "TRAIN_EPOCHS": "4",
    "TRAIN_TENSORBOARD": "0",
    "TRAIN_LOG_INTERVAL": "1",
    "TRAIN_KEEP_CHECKPOINTS": "100",
    "TRAIN_RUN_NAME": "run",
}


@pytest.mark.parametrize("ranks", [{}, pytest.param(TWO_RANKS, marks=[pytest.mark.slow, needs_two_cores])])
def test_sigusr2_saves_and_the_run_continues_unchanged(entrypoint: Entrypoint, ranks: dict[str, str]) -> None:
    run = Started(entrypoint, RUN | ranks | {"TRAIN_CHECKPOINT_EVERY": "9"})
    run.wait_for("epoch 3/4  step 22/")
    run.process.send_signal(signal.SIGUSR2)
    rest, _ = run.ended_with(0)
    found = re.search(r"step (\d+) is saved in runs/run/checkpoint, as SIGUSR2 requested", rest)
    assert found, rest
    asked = entrypoint.folder / f"runs/run/checkpoint/step-{int(found[1]):09d}"
    ended = entrypoint.summary("run")
    again = entrypoint.train(env=RUN | ranks | {"TRAIN_RUN_NAME": "again", "TRAIN_RESUME": str(asked)})
    straight = entrypoint.train(env=RUN | ranks | {"TRAIN_RUN_NAME": "straight"})
    assert ended["weights_sha256"] == straight["weights_sha256"] == again["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "said", "ranks"),
    [
        ({"TRAIN_MAX_MINUTES": "0.15"}, "stopped by TRAIN_MAX_MINUTES=0.15: step ", TWO_RANKS if CORES > 1 else {}),
        ({"SLURM_JOB_ID": "7", "LAUNCH_GRACE_PERIOD_S": "5"}, "stopped by the end of the Slurm job: step ", {}),
    ],
)
def test_deadline_saves_a_resumable_checkpoint(
    entrypoint: Entrypoint, limit: dict[str, str], said: str, ranks: dict[str, str]
) -> None:
    endless = RUN | ranks | {"TRAIN_EPOCHS": "100000", "TRAIN_LOG_INTERVAL": "auto", "LAUNCH_QUIET": "1"}
    end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 15)} if "SLURM_JOB_ID" in limit else {}
    result = entrypoint("train", env=endless | limit | end)
    assert result.code == ExitCode.PREEMPTED, result.err
    assert result.err.startswith(f"entrypoint: preempted: {said}"), result.err
    assert result.err.endswith("Run it again with TRAIN_RESUME=auto.\n")
    assert list((entrypoint.folder / "runs/run/checkpoint").glob("step-*"))


@pytest.mark.versions
def test_damaged_checkpoint_is_named_and_the_one_before_resumes(entrypoint: Entrypoint) -> None:
    whole = entrypoint.train(env=RUN | {"TRAIN_EPOCHS": "3"})
    checkpoints = sorted((entrypoint.folder / "runs/run/checkpoint").glob("step-*"))
    damage(checkpoints[2])
    damage(checkpoints[1])
    result = entrypoint.succeed("train", env=RUN | {"TRAIN_EPOCHS": "3", "TRAIN_RESUME": "auto"})
    for one in checkpoints[1:]:
        assert f"warning: skipped {one.relative_to(entrypoint.folder)}: cannot be read as a checkpoint" in result.out
    assert "resuming from runs/run/checkpoint/step-000000010" in result.out
    assert entrypoint.summary("run")["weights_sha256"] == whole["weights_sha256"]


def damage(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


STOPPING = """
import os
import signal
from torch import nn

class Net(nn.Sequential):
    calls = {True: 0, False: 0}
    def forward(self, images):
        logits = super().forward(images)
        if len(images) < 2:
            return logits
        Net.calls[self.training] += 1
        wanted = os.environ.get("STOP_IN_TRAINING" if self.training else "STOP_IN_EVALUATION")
        if str(Net.calls[self.training]) == wanted and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return logits if self.training or Net.calls[False] == 1 else -logits

def net(num_classes):
    return Net(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, num_classes))
"""


@pytest.mark.slow
@needs_two_cores
def test_sharded_run_goes_on_with_an_evaluation(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "stopping.py", STOPPING)
    env = RUN | TWO_RANKS | {"TRAIN_MODEL": "stopping:net", "TRAIN_PARALLELISM": "fsdp", "TRAIN_EPOCHS": "2"}
    assert "step 10 is saved" in entrypoint("train", env=env | {"STOP_IN_TRAINING": "9"}).err
    again = entrypoint.train(env=env | {"TRAIN_RESUME": "auto"})
    straight = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "straight"})
    assert again["weights_sha256"] == straight["weights_sha256"]


def test_stop_after_the_best_weights_are_loaded_saves_none(entrypoint: Entrypoint) -> None:
    """Each evaluation but the first finds wrong answers alone."""
    script(entrypoint.folder, "stopping.py", STOPPING)
    env = {
        "TRAIN_MODEL": "stopping:net", "TRAIN_EPOCHS": "2", "TRAIN_VAL_SPLIT": "0.2", "TRAIN_RUN_NAME": "run",
        "TRAIN_EVAL_BATCH_SIZE": "1000",
    }  # fmt: skip
    assert entrypoint.train(env=env | {"TRAIN_RUN_NAME": "straight"})["best_epoch"] == 1
    stopped = entrypoint("train", env=env | {"STOP_IN_EVALUATION": "3"})
    assert (stopped.code, "is saved in runs/run/checkpoint" in stopped.err) == (ExitCode.PREEMPTED, True)
    ended, straight = (
        max(entrypoint.folder.glob(f"runs/{name}/checkpoint/step-*/model.safetensors")) for name in ("run", "straight")
    )
    assert ended.read_bytes() == straight.read_bytes()
