"""The models: the book's CNN to the parameter, torchvision's and timm's by name, a user's own, and what is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import refusal
from tests.factories import train_settings
from train.models.cnn import CNN
from train.models.inspection import count_parameters
from train.models.registry import build_model, restore_state_metadata
from train.setting_groups.network import NetworkSettings


@pytest.mark.parametrize(
    ("shape", "arguments", "parameters"),
    [((1, 28, 28), "", 1_630_090), ((3, 32, 32), "bias=true", 2_122_186), ((1, 28, 28), "bias=0", 1_629_472)],
)
def test_cnn_has_the_books_parameters(shape: tuple[int, int, int], arguments: str, parameters: int) -> None:
    assert count_parameters(build_model(NetworkSettings(model_args=arguments), shape, 10)) == parameters


class BooksOrder(CNN):
    """The CNN with ReLU before the pooling, as the book has it."""

    def forward(self, images: Tensor) -> Tensor:
        for convolution, pooling, _ in (self.layer1, self.layer2):
            images = pooling(torch.relu(convolution(images)))
        logits: Tensor = self.fc2(torch.relu(self.fc1(images.flatten(1))))
        return logits


def test_cnn_learns_bitwise_what_the_books_layer_order_learns() -> None:
    torch.manual_seed(0)
    ours, books = CNN((3, 32, 32), 10), BooksOrder((3, 32, 32), 10)
    books.load_state_dict(ours.state_dict())
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    for model in (ours, books):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    for mine, theirs in zip(ours.parameters(), books.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 5, 9), (2, 33, 7), (1, 8, 8)])
def test_cnn_accepts_any_size_and_channels(shape: tuple[int, int, int]) -> None:
    assert CNN(shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.seconds
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet18", (3, 32, 32)),
        ("resnet18", (1, 28, 28)),
        ("mobilenet_v3_small", (3, 64, 64)),
        ("vit_b_32", (3, 64, 64)),
        ("googlenet", (3, 64, 64)),
        ("inception_v3", (3, 96, 96)),
    ],
)
def test_build_model_finds_torchvision_models(name: str, shape: tuple[int, int, int]) -> None:
    model = build_model(NetworkSettings(model=name), shape, 5)
    model.train()
    assert model(torch.zeros(2, *shape)).shape == (2, 5)


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("name", ["mnasnet0_5", "resnet18"])
def test_state_dict_of_tensors_is_loaded_for_any_model_version(name: str) -> None:
    saved, model = (build_model(NetworkSettings(model=name), (3, 32, 32), 5) for _ in range(2))
    state = {name: value.clone() for name, value in saved.state_dict().items()}
    model.load_state_dict(restore_state_metadata(model, state))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("resnet81", (3, 32, 32), "TRAIN_MODEL=resnet81: no such model. Did you mean resnet18?"),
        ("maskrcnn_resnet50_fpn", (3, 32, 32), "no such model"),
        ("alexnet", (3, 16, 16), "TRAIN_MODEL=alexnet: cannot take 3x16x16 images"),
        ("vit_b_16", (3, 30, 30), "cannot take 3x30x30 images"),
    ],
)
def test_build_model_wrong_input_raises(name: str, shape: tuple[int, int, int], said: str) -> None:
    refusal(build_model, NetworkSettings(model=name), shape, 5, match=said.split("(")[0])


MODULE = """
from torch import nn

def plain(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))

def sized(num_classes, in_channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))

def anything(**options):
    return plain(options["num_classes"])

class Net(nn.Sequential):
    def __init__(self, num_classes, width=4):
        super().__init__(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))

class holder:
    inner = plain

def strange(classes): return None
def raises(num_classes): raise KeyError("lost")
def empty(num_classes): return nn.Identity()
def number(num_classes): return 3
def five(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
class Pair(nn.Linear):
    def forward(self, images): return super().forward(images.flatten(1)), None
def pair(num_classes): return Pair(192, num_classes)
class Odd(nn.Linear):
    def forward(self, images): raise KeyError("inside")
def odd(num_classes): return Odd(192, num_classes)
text = "no function"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_models.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import json\nraise RuntimeError('half way')\n")
    (tmp_path / "leaving_module.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "needy_module.py").write_text("import nobody_has_this\n")
    yield tmp_path
    sys.modules.pop("own_models", None)
    sys.path[:] = [one for one in sys.path if one != str(tmp_path)]


@pytest.mark.parametrize("name", ["plain", "sized", "anything", "Net", "holder.inner"])
def test_factory_builds_the_model(folder: Path, name: str) -> None:
    model = build_model(train_settings(model=f"own_models:{name}", model_path=folder).network, (3, 8, 8), 7)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_models:strange", "takes no num_classes but (classes)"),
        ("own_models:raises", "raised KeyError: 'lost' in own_models.py, line 21"),
        ("own_models:empty", "has no parameters"),
        ("own_models:number", "returns int and not an nn.Module"),
        ("own_models:five", "returns 1x5 for one image, and 7 classes need 1x7"),
        ("own_models:pair", "returns tuple and not a tensor"),
        ("own_models:odd", "the model raised KeyError: 'inside'"),
        ("own_models:text", "cannot be called"),
        ("own_models:plian", "no plian in own_models. Did you mean plain?"),
        ("nobody:plain", "no module nobody is installed or in TRAIN_MODEL_PATH="),
        ("broken_module:x", "its module raised RuntimeError: half way in broken_module.py, line 2"),
        ("leaving_module:x", "its module raised SystemExit"),
        ("needy_module:x", "needs nobody_has_this. Install it"),
    ],
)
def test_factory_that_cannot_be_used_is_one_line(folder: Path, name: str, said: str) -> None:
    line = refusal(build_model, train_settings(model=name, model_path=folder).network, (3, 8, 8), 7)
    assert line.startswith(f"TRAIN_MODEL={name}: ")
    assert said in line


@pytest.mark.parametrize(("name", "shape"), [("resnet18", (1, 32, 32)), ("vit_tiny_patch16_224", (3, 64, 64))])
def test_timm_model_takes_the_images(name: str, shape: tuple[int, int, int]) -> None:
    pytest.importorskip("timm", reason="timm cannot be loaded", exc_type=(ImportError, RuntimeError))
    assert build_model(train_settings(model=f"timm:{name}").network, shape, 5)(torch.zeros(2, *shape)).shape == (2, 5)


def test_unknown_timm_model_suggests_a_name() -> None:
    pytest.importorskip("timm", reason="timm cannot be loaded", exc_type=(ImportError, RuntimeError))
    refusal(
        build_model,
        train_settings(model="timm:resnet19").network,
        (3, 32, 32),
        5,
        match=r"no such model in timm .*Did you mean resnet18",
    )


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [
        ("own_models:Net", "width=9", 9 * 27 + 9 + 9 * 7 + 7),
        ("resnet18", "norm_layer=none zero_init_residual=true", 11_180_103),
        ("timm:vit_tiny_patch16_224", "img_size=8 patch_size=4 depth=1 drop_path_rate=0.1", None),
    ],
)
def test_model_arguments_reach_the_model(folder: Path, name: str, arguments: str, parameters: int | None) -> None:
    if name.startswith("timm:"):
        pytest.importorskip("timm", reason="timm cannot be loaded", exc_type=(ImportError, RuntimeError))
    model = build_model(train_settings(model=name, model_path=folder, model_args=arguments).network, (3, 8, 8), 7)
    if parameters is not None:
        assert count_parameters(model) == parameters
    else:
        assert len(model.blocks) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("own_models:sized", "image_sise=9", "image_sise is no argument of own_models:sized. Did you mean image_size?"),
        ("resnet18", "zero_init_residul=1", "is no argument of resnet18. Did you mean zero_init_residual?"),
        ("cnn", "bias=1 bias=0", "bias is there twice. Leave one out."),
        ("resnet18", "num_classes=3", "num_classes is no argument to give, the data have classes"),
        ("timm:resnet18", "drop_path_rat=0.1", "is no argument of timm:resnet18. Did you mean drop_path_rate?"),
        ("timm:resnet18", "pretrained=true", "pretrained is no argument to give, TRAIN_WEIGHTS sets it"),
        ("cnn", "width=3", "width is no argument of cnn. It takes bias."),
        ("cnn", "bias=off", "bias is 0 or 1"),
        ("speednet", "bias=0", "bias is no argument of speednet. It takes none."),
    ],
)
def test_model_argument_that_cannot_be_used(folder: Path, name: str, arguments: str, said: str) -> None:
    if name.startswith("timm:"):
        pytest.importorskip("timm", reason="timm cannot be loaded", exc_type=(ImportError, RuntimeError))
    assert refusal(
        build_model,
        train_settings(model=name, model_path=folder, model_args=arguments).network,
        (3, 8, 8),
        7,
        match=re.escape(said),
    ).startswith(f"TRAIN_MODEL_ARGS={arguments}: ")
