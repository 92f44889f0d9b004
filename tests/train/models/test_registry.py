"""The models: the book's CNN to the parameter, torchvision's by name, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entrypoint.core.errors import UserError
from train.models.cnn import CNN
from train.models.inspection import count_parameters
from train.models.registry import build_model, restore_state_metadata
from train.settings import TrainSettings

try:
    import torchvision  # noqa: F401

    NO_TORCHVISION = ""
except (ImportError, RuntimeError) as error:
    NO_TORCHVISION = f"torchvision cannot be imported here: {error}"

needs_torchvision = pytest.mark.skipif(bool(NO_TORCHVISION), reason=NO_TORCHVISION)


@pytest.mark.parametrize(
    ("shape", "bias", "parameters"),
    [((1, 28, 28), True, 1_630_090), ((3, 32, 32), True, 2_122_186), ((1, 28, 28), False, 1_629_472)],
)
def test_cnn_has_the_books_parameters(shape: tuple[int, int, int], bias: bool, parameters: int) -> None:
    assert count_parameters(build_model(TrainSettings(model="cnn", bias=bias), shape, 10)) == parameters


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


@needs_torchvision
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
    model = build_model(TrainSettings(model=name), shape, 5)
    model.train()
    assert model(torch.zeros(2, *shape)).shape == (2, 5)


@needs_torchvision
@pytest.mark.parametrize("name", ["mnasnet0_5", "resnet18"])
def test_state_dict_of_tensors_is_loaded_for_any_model_version(name: str) -> None:
    saved, model = (build_model(TrainSettings(model=name), (3, 32, 32), 5) for _ in range(2))
    state = {name: value.clone() for name, value in saved.state_dict().items()}
    model.load_state_dict(restore_state_metadata(model, state))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@needs_torchvision
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
    with pytest.raises(UserError, match=said.split("(")[0]):
        build_model(TrainSettings(model=name), shape, 5)
