"""Exported files give the model's own logits, in the runtime that each format is for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, refusal
from train.acceleration.small_conv import SmallConv2d, use_matmul_for_small_inputs
from train.checkpoint.metadata import OutputScale
from train.data.datasets import load_digits
from train.evaluation.exports import RUNNERS, Exported, Runner, check_logits, export_model, run_onnx
from train.models.cnn import CNN
from train.models.registry import build_model
from train.planning.export_formats import FORMATS, check_formats
from train.setting_groups.data import DataSettings
from train.setting_groups.network import NetworkSettings
from train.settings import TrainSettings
from train.transforms.normalize import Normalize

SHAPE = (3, 32, 32)
CLASSES = tuple("abcdefghij")
GRAY = Normalize.from_stats(torch.tensor([120.0]), torch.tensor([60.0]), torch.device("cpu"))
HALF = Normalize.from_stats(torch.tensor([120.0, 121, 122]), torch.tensor([60.0, 61, 62]), torch.device("cpu"))


MODULES = {"onnx": "onnxruntime", "openvino": "openvino", "executorch": "executorch"}


def exported(model: torch.nn.Module, normalize: Normalize = HALF, **settings: Any) -> Exported:
    shape = SHAPE if len(normalize.mean.flatten()) == 3 else (1, 8, 8)
    return Exported.of(model, normalize, shape, DataSettings(**settings), CLASSES)


@pytest.mark.seconds
@pytest.mark.slow_except("onnx-cnn", "torch-export-cnn")
@pytest.mark.parametrize("name", ["cnn", "resnet18"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_runtime_gives_equal_logits_for_any_batch_size(tmp_path: Path, format_name: str, name: str) -> None:
    for package in (MODULES.get(format_name, "torch"), "torch" if name == "cnn" else "torchvision"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = build_model(NetworkSettings(model=name), SHAPE, 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    files = export_model(exported(model), [format_name], tmp_path)
    assert model.training, "the model itself is left as it was"
    assert tmp_path / FORMATS[format_name] in files
    assert {*tmp_path.iterdir()} == {*files, tmp_path / "model.json"}
    about = json.loads((tmp_path / "model.json").read_text())
    assert about.pop("pixels") == [
        "decode as RGB of 8 bits, transparent parts on white, upright by EXIF",
        "cut the largest box with the sides 32:32 out of the middle",
        "resize to width 32 and height 32, bilinear with antialiasing",
    ]
    assert about == {
        "task": "classify", "classes": list(CLASSES), "threshold": 0.5, "temperature": 1.0, "shape": list(SHAPE),
    }  # fmt: skip
    run = RUNNERS[format_name](tmp_path / FORMATS[format_name])
    for count in (1, 5):
        pixels = torch.randint(0, 256, (count, *SHAPE)).float()
        with torch.no_grad():
            expected = model.eval()((pixels - HALF.mean) * HALF.scale)
        assert torch.allclose(run(pixels), expected, atol=1e-4)


@pytest.mark.slow
def test_small_conv_is_exported_as_convolution(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    onnx = pytest.importorskip("onnx")
    model = use_matmul_for_small_inputs(build_model(NetworkSettings(model="resnet18"), SHAPE, 10), SHAPE)
    export_model(exported(model), ["onnx"], tmp_path)
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert sum(node.op_type == "Conv" for node in nodes) == 20
    assert any(isinstance(module, SmallConv2d) for module in model.modules())


@pytest.mark.seconds
def test_regression_exports_numbers_in_the_unit_of_the_targets(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    scaled = replace(GRAY, outputs=OutputScale(mean=(5.0,) * 10, deviation=(2.0,) * 10))
    model = CNN((1, 8, 8), 10)
    export_model(exported(model, scaled, task="regress"), ["onnx"], tmp_path)
    pixels = torch.zeros(2, 1, 8, 8)
    with torch.no_grad():
        expected = model.eval()(GRAY.mean.neg().expand(2, 1, 8, 8) * GRAY.scale) * 2 + 5
    assert torch.allclose(run_onnx(tmp_path / "model.onnx")(pixels), expected, atol=1e-4)


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


@pytest.mark.parametrize(
    ("settings", "last", "count"),
    [
        ({}, "resize to width 8 and height 8, bilinear with antialiasing", 3),
        ({"image_size": 8, "eval_size": 12}, "resize to width 12 and height 12, bilinear with antialiasing", 4),
        ({"transforms": "book"}, "cut 224 x 224 out of the middle", 5),
        ({"transforms": "imagenet"}, "resize to width 8 and height 8, bilinear with antialiasing", 3),
    ],
)
def test_page_of_a_model_says_how_files_become_pixels(settings: dict[str, Any], last: str, count: int) -> None:
    steps = exported(CNN((1, 8, 8), 10), GRAY, **settings).metadata["pixels"]
    assert ("of that 0.875 of each side in the middle" in steps[1]) is (settings.get("transforms") == "imagenet")
    assert (len(steps), steps[0], steps[-1]) == (
        count,
        "decode as gray of 8 bits, transparent parts on white, upright by EXIF",
        last,
    )


@pytest.mark.launch
def test_finished_run_is_exported_by_its_own_command(entrypoint: Entrypoint) -> None:
    pytest.importorskip("onnxruntime")
    entrypoint.train(env={"TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "run"})
    done = entrypoint("export", "runs/run", "onnx", "torch-export", "onnx")
    assert (done.code, done.out) == (0, "runs/run/model.onnx\nruns/run/model.pt2\n")
    for words, problem in {
        ("runs/run",): "export: needs a trained model and formats",
        ("runs/run", "gguf"): "export: 'gguf' is no format",
        ("runs/other", "onnx"): "export=runs/other",
        ("runs/run", "onnx", "--top=3"): "--top=3: has no effect on an export",
    }.items():
        refused = entrypoint("export", *words)
        assert refused.code == ExitCode.USAGE
        assert problem in refused.error_lines[0]


@pytest.mark.launch
def test_resumed_run_removes_the_exports_of_its_old_weights(entrypoint: Entrypoint) -> None:
    entrypoint.train("--run-name=run", "--export=torch-export", env={"TRAIN_EPOCHS": "1"})
    (entrypoint.folder / "runs/run/model.int8.onnx").touch()
    assert (entrypoint.folder / "runs/run/model.pt2").exists()
    entrypoint.train("--resume=runs/run", "--epochs=2", "--export=off")
    assert not list((entrypoint.folder / "runs/run").glob("model.pt2"))
    assert not (entrypoint.folder / "runs/run/model.int8.onnx").exists()


def test_missing_package_of_a_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.core.packages.find_spec", lambda name: None if name == "openvino" else name)
    said = r"^--export=openvino: needs openvino, .*\[openvino\]"
    refusal(check_formats, ["onnx", "openvino"], "--export=openvino", match=said, code=ExitCode.MACHINE)


@pytest.mark.slow
def test_failure_of_an_exporter_leaves_no_partial_file(tmp_path: Path) -> None:
    class Stubborn(CNN):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) if float(images.sum()) > 0 else torch.zeros(len(images), 10)

    stubborn = exported(Stubborn(SHAPE, 10))
    refusal(
        export_model,
        stubborn,
        ["onnx"],
        tmp_path,
        match="export onnx: the model cannot be exported",
        code=ExitCode.MACHINE,
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.seconds
def test_formats_after_one_that_fails_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> Runner:
        raise ValueError("no kernel for this")

    monkeypatch.setitem(RUNNERS, "onnx", fail)
    model = exported(CNN((1, 8, 8), 10), GRAY)
    refusal(
        export_model,
        model,
        ["onnx", "torch-export"],
        tmp_path,
        match="export onnx: the model cannot be exported",
        code=ExitCode.MACHINE,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt2", "model.json"}


@pytest.mark.seconds
def test_file_with_other_logits_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = CNN((1, 8, 8), 10)
    export_model(exported(model, GRAY), ["onnx"], tmp_path)
    with torch.no_grad():
        model.fc2.bias[3] += 0.5
    run, said = run_onnx(tmp_path / "model.onnx"), r"^export onnx: the file's logits differ from the model's by"
    refusal(check_logits, exported(model, GRAY), "onnx", run, match=said, code=ExitCode.MACHINE)
