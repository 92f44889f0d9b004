"""The exported file gives the model's own logits, in another program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from entrypoint.core.errors import ExitCode, UserError
from tests.conftest import Entrypoint
from train.acceleration.small_conv import SmallConv2d, use_matmul_for_small_inputs
from train.data.datasets import load_digits
from train.evaluation.onnx_export import NormalizedModel, check_logits, export_onnx
from train.models.cnn import CNN
from train.models.registry import build_model
from train.settings import TrainSettings
from train.transforms.normalize import Normalize

SHAPE = (3, 32, 32)
CLASSES = tuple("abcdefghij")
GRAY = Normalize.from_stats(torch.tensor([120.0]), torch.tensor([60.0]), torch.device("cpu"))
HALF = Normalize.from_stats(torch.tensor([120.0, 121, 122]), torch.tensor([60.0, 61, 62]), torch.device("cpu"))


@pytest.mark.slow_except("cnn")
@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_onnxruntime_gives_equal_logits_for_any_batch_size(tmp_path: Path, name: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    if name != "cnn":
        pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = build_model(TrainSettings(model=name), SHAPE, 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    export_onnx(model, HALF, SHAPE, CLASSES, tmp_path / "model.onnx")
    assert model.training, "the model itself is left as it was"
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(CLASSES)
    for count in (1, 5):
        pixels = torch.randint(0, 256, (count, *SHAPE)).float()
        with torch.no_grad():
            expected = model.eval()((pixels - HALF.mean) * HALF.scale)
        (logits,) = session.run(None, {"pixels": pixels.numpy()})
        assert torch.allclose(torch.from_numpy(logits), expected, atol=1e-4)
        model.train()


@pytest.mark.slow
def test_small_conv_is_exported_as_convolution(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    onnx = pytest.importorskip("onnx")
    model = use_matmul_for_small_inputs(build_model(TrainSettings(model="resnet18"), SHAPE, 10), SHAPE)
    export_onnx(model, HALF, SHAPE, CLASSES, tmp_path / "model.onnx")
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert sum(node.op_type == "Conv" for node in nodes) == 20
    assert any(isinstance(module, SmallConv2d) for module in model.modules())


@pytest.mark.launch
def test_run_exports_its_model_as_onnx(entrypoint: Entrypoint) -> None:
    runtime = pytest.importorskip("onnxruntime")
    summary = entrypoint.train(env={"TRAIN_EPOCHS": "2", "TRAIN_EXPORT": "onnx", "TRAIN_RUN_NAME": "run"})
    folder = entrypoint.folder / "runs/run"
    session = runtime.InferenceSession(str(folder / "model.onnx"))
    assert (
        json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == summary["classes"] == list("0123456789")
    )
    test = load_digits(TrainSettings()).test
    (logits,) = session.run(None, {"pixels": test.images.permute(0, 3, 1, 2).float().numpy()})  # type: ignore[union-attr]
    right = (torch.from_numpy(logits).argmax(1) == test.labels).float().mean()  # type: ignore[union-attr]
    assert 100 * float(right) == pytest.approx(summary["test_accuracy"], abs=0.01)


@pytest.mark.slow
def test_export_onnx_failure_leaves_no_partial_file(tmp_path: Path) -> None:
    class Stubborn(CNN):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) if float(images.sum()) > 0 else torch.zeros(len(images), 10)

    with pytest.raises(UserError, match="TRAIN_EXPORT=onnx: the model cannot be exported") as error:
        export_onnx(Stubborn(SHAPE, 10), HALF, SHAPE, CLASSES, tmp_path / "model.onnx")
    assert error.value.code == ExitCode.MACHINE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("runtime", [True, False])
def test_file_with_other_logits_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: bool) -> None:
    if not runtime:
        monkeypatch.setattr("train.evaluation.onnx_export.find_spec", lambda _: None)
    model = CNN((1, 8, 8), 10)
    export_onnx(model, GRAY, (1, 8, 8), CLASSES, tmp_path / "good.onnx")
    assert (tmp_path / "good.onnx").exists()
    content = (tmp_path / "good.onnx").read_bytes()
    with torch.no_grad():
        model.fc2.bias[3] += 0.5
    whole = NormalizedModel(model.eval(), GRAY)
    with pytest.raises(UserError, match=r"^TRAIN_EXPORT=onnx: the file's logits differ from the model's by"):
        check_logits(whole, content, (1, 8, 8))
