"""An int8 model is written only if it keeps the score, and layers that lose most stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, paint, refusal
from tests.train.given import imagefolder
from train.evaluation.exports import Exported, Runner, run_onnx
from train.models.cnn import CNN
from train.setting_groups.data import DataSettings
from train.transforms.normalize import Normalize

pytest.importorskip("onnxruntime")
from train.evaluation.quantize import Quantizer, find_layers

pytestmark = pytest.mark.seconds

GRAY = Normalize.from_stats(torch.tensor([120.0]), torch.tensor([60.0]), torch.device("cpu"))
PIXELS = torch.randint(0, 256, (64, 1, 8, 8), generator=torch.Generator().manual_seed(0)).float()


@pytest.fixture
def quantizer(tmp_path: Path) -> Quantizer:
    """Return the quantizer of a network whose first layer alone has weights that differ too much for int8."""
    torch.manual_seed(0)
    model = CNN((1, 8, 8), 10)
    with torch.no_grad():
        model.layer1[0].weight[:, :, 0, 0] *= 300
    exported = Exported.of(model, GRAY, (1, 8, 8), DataSettings(), tuple("abcdefghij"))
    return Quantizer(exported, PIXELS, tmp_path)


def test_layer_that_changes_the_logits_most_is_first(quantizer: Quantizer) -> None:
    assert len(quantizer.layers) == 4
    worst = quantizer.worst_first()
    assert sorted(worst) == sorted(quantizer.layers)
    expected = run_onnx(quantizer.plain)(PIXELS)
    change = [float((quantizer.write([name], PIXELS)(PIXELS) - expected).square().sum()) for name in worst]
    assert change[0] == max(change)
    assert change[-1] == min(change)


def test_fewest_layers_that_keep_the_score_are_left_out(quantizer: Quantizer) -> None:
    expected = run_onnx(quantizer.plain)(PIXELS)

    def score(run: Runner) -> float:
        return 100 - float((run(PIXELS) - expected).abs().max() / expected.abs().max())

    whole = score(quantizer.write(quantizer.layers, PIXELS))
    _, better, left_out = find_layers(quantizer, score, whole + 1e-6)
    assert left_out == quantizer.worst_first()[: len(left_out)]
    assert better > whole
    assert not find_layers(quantizer, score, whole)[2]
    said = r"^TRAIN_MAX_LOSS: int8 has a score of 99\..*100\.00 %"
    refusal(find_layers, quantizer, score, 100.0, match=said)


def test_transformer_keeps_its_activations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(8, 4, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=128, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # torchvision's is 0
    gray = Normalize.from_stats(torch.full((3,), 120.0), torch.full((3,), 60.0), torch.device("cpu"))
    pixels = PIXELS.expand(-1, 3, -1, -1)
    quantizer = Quantizer(Exported.of(model, gray, (3, 8, 8), DataSettings(), tuple("abcdefghij")), pixels, tmp_path)
    assert quantizer.weights_alone
    assert len(quantizer.layers) == 2 * 3, "of each block; what it adds up is a Gemm"
    expected = run_onnx(quantizer.plain)(pixels)
    all_layers = quantizer.write(quantizer.layers, pixels)(pixels)
    small = quantizer.int8.stat().st_size
    one_layer = quantizer.write(quantizer.layers[:1], pixels)(pixels)
    assert small < quantizer.int8.stat().st_size < quantizer.plain.stat().st_size
    assert 0 < (one_layer - expected).abs().max() < (all_layers - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.launch
def test_quantized_run_has_about_the_score_that_is_printed(entrypoint: Entrypoint) -> None:
    entrypoint.train(env={"TRAIN_EPOCHS": "4", "TRAIN_RUN_NAME": "run"})
    done = entrypoint.succeed("quantize", "runs/run")
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines() if line.strip()}
    assert float(rows["score"][2]) >= float(rows["score"][0]) - 1
    assert float(rows["file"][2]) < float(rows["file"][0]) / 2
    file = entrypoint.folder / "runs/run/model.int8.onnx"
    assert run_onnx(file)(PIXELS).shape == (64, 10)
    assert rows["written"] == ["runs/run/model.int8.onnx"]


@pytest.mark.launch
def test_what_cannot_be_quantized_is_refused_by_the_plan(entrypoint: Entrypoint) -> None:
    paint(entrypoint.folder / "images/train", each=8)
    paint(entrypoint.folder / "images/test", each=4)
    entrypoint.train("--run-name=run", env=imagefolder(entrypoint.folder / "images", TRAIN_EPOCHS="1"))
    two = entrypoint("quantize", "runs/run", "--dry-run", "--nproc-per-node=2")
    assert (two.code, "quantize: one rank computes, and this job has 2" in two.error_lines[0]) == (ExitCode.USAGE, True)
    planned = entrypoint("quantize", "runs/run", "--dry-run")
    assert "int8       model.int8.onnx" in planned.out
    assert entrypoint("quantize").error_lines[0].endswith("Use `entrypoint quantize RUN`.")
    (entrypoint.folder / "images/train").rename(entrypoint.folder / "elsewhere")
    assert entrypoint("quantize", "runs/run", "--dry-run").code == ExitCode.USAGE, "training images give the ranges"
