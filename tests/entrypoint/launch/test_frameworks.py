"""A user's own scripts by Lightning and by Hugging Face's accelerate, which read the ranks' variables themselves."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import PYTHON, Entrypoint, launcher, needs_two_cores, script

pytestmark = [pytest.mark.launch, needs_two_cores]
QUIET = {"LAUNCH_QUIET": "1"}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"needs {package}, which is not here")


ACCELERATE = """
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4))
    model, optimizer, batches = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    steps = 0
    for (images,) in batches:
        optimizer.zero_grad()
        accelerator.backward(model(images).square().mean())
        optimizer.step()
        steps += 1
    weights = accelerator.unwrap_model(model).weight.double().sum()
    alike = accelerator.gather(weights[None]).unique().numel()
    print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {steps} steps, {alike} result", flush=True)
"""


@pytest.mark.slow_except("2")
@needs("accelerate")
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_trains_over_all_ranks(entrypoint: Entrypoint, ranks: int) -> None:
    file = script(entrypoint.folder, "x.py", ACCELERATE)
    result = entrypoint.succeed("run", f"--nproc-per-node={ranks}", file, env=QUIET)
    said = sorted(line for line in result.out.splitlines() if line.startswith("rank "))
    assert said == [f"rank {rank} of {ranks}: {8 // ranks} steps, 1 result" for rank in range(ranks)]


LIGHTNING = """
    import sys
    import torch
    from pytorch_lightning import LightningModule, Trainer

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, _):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", devices=int(sys.argv[1]), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), batches)
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps", flush=True)
"""
# What sbatch leaves in the environment of all that a batch script starts; Lightning would take it for srun's.
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_NNODES": "1",
}  # fmt: skip


@pytest.mark.slow
@needs("pytorch_lightning")
def test_lightning_trains_over_all_ranks(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "x.py", LIGHTNING)
    result = entrypoint.succeed("run", "--nproc-per-node=2", file, "2", env=QUIET)
    assert {"rank 0 of 2: 4 steps", "rank 1 of 2: 4 steps"} <= set(result.out.splitlines())


@pytest.mark.slow
@needs("pytorch_lightning")
@pytest.mark.openmpi
def test_lightning_trains_over_mpirun_ranks_in_a_batch_job(entrypoint: Entrypoint) -> None:
    mpirun = launcher("mpirun.openmpi", "mpirun", said="Open MPI")
    file = script(entrypoint.folder, "x.py", LIGHTNING)
    command = (mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2", PYTHON, "-m", "entrypoint")
    result = entrypoint.succeed("run", file, "2", env=QUIET | BATCH, command=command)
    assert {"rank 0 of 2: 4 steps", "rank 1 of 2: 4 steps"} <= set(result.out.splitlines())


@needs("pytorch_lightning")
def test_lightning_too_many_devices_fails_without_waiting(
    entrypoint: Entrypoint,
) -> None:
    file = script(entrypoint.folder, "x.py", LIGHTNING)
    result = entrypoint("run", file, "2", env=QUIET)
    assert result.code != 0
    assert "does not match the world size (1)" in result.err
