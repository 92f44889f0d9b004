"""TRAIN_GRAD_ACCUM_STEPS=auto: micro-batches by the memory of a rank, from what an image really takes."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.plan.model import Plan
from tests.conftest import PYTHON, Entrypoint, clean_environment
from tests.factories import make_machine, make_test_plan, train_settings
from tests.train.given import SMALL
from train.data.dataset_info import DatasetInfo
from train.engine.model_probe import bytes_per_image, fixed_bytes
from train.engine.optimizer import build_optimizer
from train.models.registry import build_model
from train.planning.grad_accumulation import with_accumulation
from train.planning.model_report import ModelReport
from train.settings import read_train_settings

GIB = 1 << 30
FEW = DatasetInfo(100, (3, 32, 32))


def planned(
    memory_gib: float, ranks: int, batch: int, image_mib: float, dataset: DatasetInfo = FEW
) -> tuple[int, Plan]:
    machine = replace(make_machine(8), memory_bytes=int(memory_gib * GIB))
    plan = make_test_plan(machine, {"LAUNCH_NPROC_PER_NODE": str(ranks)})
    given = read_train_settings({"TRAIN_GRAD_ACCUM_STEPS": "auto", "TRAIN_BATCH_SIZE": str(batch)}, {})
    report = ModelReport(bytes_per_image=int(image_mib * (1 << 20)), fixed_bytes=GIB)
    found, plan = with_accumulation(given, plan, dataset, machine, report)
    return found.values.micro_batches, plan


@pytest.mark.parametrize(
    ("memory_gib", "ranks", "batch", "image_mib", "steps"),
    [
        (16, 1, 64, 1, 1),  # 64 x 1.5 MiB
        (16, 1, 1024, 20, 3),  # 10.8 GiB hold 368 of 1,024 images
        (16, 2, 1024, 20, 4),  # 4.4 GiB hold 150 of a rank's 512
        (16, 1, 4, 7000, 4),  # one image at a time
        (0, 1, 1024, 20, 1),  # nobody knows how much there is
    ],
)
def test_fewest_micro_batches_that_fit(memory_gib: float, ranks: int, batch: int, image_mib: float, steps: int) -> None:
    found, plan = planned(memory_gib, ranks, batch, image_mib)
    assert found == steps
    assert plan.environment.variables["TRAIN_GRAD_ACCUM_STEPS"] == str(steps)
    decision = plan.decision("micro-batches")
    assert decision is not None
    assert decision.value == str(steps)


def test_decoded_images_take_memory_too() -> None:
    assert planned(16, 1, 1024, 20)[0] < planned(16, 1, 1024, 20, DatasetInfo(10**6, (3, 64, 64)))[0]


def test_image_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^TRAIN_GRAD_ACCUM_STEPS=auto: training on one image takes about 16\.0"
    ) as caught:
        planned(16, 1, 64, 10240)
    assert caught.value.code == ExitCode.MACHINE


PEAK = """
import re, sys, torch
from pathlib import Path
from train.settings import TrainSettings
from train.models.registry import build_model
from train.engine.optimizer import build_optimizer
torch.set_num_threads(1)
settings = TrainSettings(model=sys.argv[1])
model = build_model(settings, (3, 64, 64), 10)
optimizer = build_optimizer(settings, model)
for size in (2, 2, int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.randn(size, 3, 64, 64)).square().mean().backward()
    optimizer.step()
    # Of getrusage, a process inherits the peak of the one that started it.
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
"""


@pytest.mark.slow_except("cnn")
@pytest.mark.parametrize(
    ("model", "images"), [("cnn", 512), ("speednet-half", 512), ("resnet18", 256), ("mobilenet_v2", 128)]
)
def test_estimate_is_near_the_peak_of_a_real_step(model: str, images: int) -> None:
    if model in ("resnet18", "mobilenet_v2"):
        pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    done = subprocess.run(
        [PYTHON, "-c", PEAK, model, str(images)], capture_output=True, text=True, check=True, env=clean_environment()
    )
    _, before, peak = map(int, done.stdout.split())
    settings = train_settings(model=model)
    estimate = 1.5 * images * bytes_per_image(settings, build_model(settings, (3, 64, 64), 10), (3, 64, 64))
    print(f"{model}: {estimate / (peak - before):.2f} of the measured memory")
    assert 0.7 < estimate / (peak - before) < 2.5


def test_fixed_memory_counts_optimizer_and_average() -> None:
    settings = train_settings(optimizer="adamw", ema_decay=0.9)
    model = build_model(settings, (1, 8, 8), 10)
    optimizer = build_optimizer(settings, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = sum(one.nbytes for one in model.parameters())
    assert fixed_bytes(settings, model, optimizer) == pytest.approx(5 * weights, rel=0.01)


@pytest.mark.launch
def test_run_takes_the_planned_number(entrypoint: Entrypoint) -> None:
    env = SMALL | {"TRAIN_GRAD_ACCUM_STEPS": "auto", "TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "run"}
    made = entrypoint.plan("train", env=env)
    decisions = {one["key"]: one for one in made["decisions"]}
    assert decisions["micro-batches"]["value"] == "1"
    assert "64 images of a rank take about" in decisions["micro-batches"]["reason"]
    entrypoint.train(env=env)
    assert json.loads((entrypoint.folder / "runs/run/settings.json").read_text())["grad_accum_steps"] == 1
