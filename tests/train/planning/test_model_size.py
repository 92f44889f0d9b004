"""A model that no memory here can hold is refused before any rank allocates it."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from tests.factories import make_machine, make_test_plan
from train.models.registry import build_model
from train.planning.model_size import check_model_memory, count_large_weights, weight_memory
from train.settings import ImageShape, TrainSettings, read_train_settings

PLENTY: ImageShape = (3, 4096, 4096)


@pytest.mark.parametrize("model", ["cnn", "speednet", "speednet-half"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 224, 224), (300, 40, 65)])
def test_weights_are_those_of_the_layers_that_grow(model: str, shape: ImageShape) -> None:
    def parameters(images: ImageShape) -> tuple[int, int]:
        with torch.device("meta"):
            made = list(build_model_unchecked(model, images).parameters())
        trained = sum(one.numel() for one in made if one.requires_grad)
        return trained, sum(one.numel() for one in made) - trained

    small: ImageShape = (1, 12, 12)
    grows = [now - then for now, then in zip(parameters(shape), parameters(small), strict=True)]
    counted = zip(count_large_weights(model, shape), count_large_weights(model, small), strict=True)
    biases = 8 * (shape[0] - 1)  # of the whitening layer, which the half width does not train
    left_out = {"cnn": (0, 0), "speednet": (biases, 0), "speednet-half": (0, biases)}[model]
    assert [now - then for now, then in counted] == [one - other for one, other in zip(grows, left_out, strict=True)]


def build_model_unchecked(model: str, shape: ImageShape) -> torch.nn.Module:
    """Return a model without the pass of an image, which a model on the meta device cannot do."""
    from train.models.cnn import CNN
    from train.models.speednet import WIDTHS, SpeedNet

    return CNN(shape, 10) if model == "cnn" else SpeedNet(WIDTHS[model], shape, 10)


def test_a_real_model_has_at_least_these_weights() -> None:
    made = build_model(TrainSettings(model="cnn"), (1, 28, 28), 10)
    assert 0.9 < count_large_weights("cnn", (1, 28, 28))[0] / sum(one.numel() for one in made.parameters()) <= 1


@pytest.mark.parametrize(
    ("environ", "copies"),
    [
        ({}, 3),
        ({"TRAIN_MOMENTUM": "0"}, 2),
        ({"TRAIN_OPTIMIZER": "adam"}, 4),
        ({"TRAIN_OPTIMIZER": "adamw", "TRAIN_EMA_DECAY": "0.9"}, 5),
        ({"TRAIN_PARALLELISM": "fsdp", "TRAIN_OPTIMIZER": "adam"}, 1),
    ],
)
def test_each_copy_of_the_weights_counts(environ: dict[str, str], copies: int) -> None:
    settings = read_train_settings(environ, {}).values
    count, needed = weight_memory(settings, (1, 28, 28))
    assert needed == 4 * copies * count


@pytest.mark.parametrize(
    ("environ", "shape", "cores_gib", "refused"),
    [
        ({}, PLENTY, 64, True),  # 34 billion weights
        ({}, PLENTY, 400, False),
        ({"LAUNCH_NPROC_PER_NODE": "2"}, PLENTY, 400, True),
        ({"TRAIN_TRANSFORMS": "book"}, PLENTY, 64, False),  # crops 224x224
        ({"TRAIN_MODEL": "resnet18"}, PLENTY, 64, False),  # pools to one value a channel
        ({"TRAIN_MODEL": "speednet"}, (9999, 9, 9), 8, True),
        ({}, (1, 8, 8), 1, False),
        ({}, PLENTY, 0, False),  # unknown
    ],
)
def test_model_larger_than_memory_is_refused(
    environ: dict[str, str], shape: ImageShape, cores_gib: int, refused: bool
) -> None:
    given = read_train_settings(environ, {})
    node = replace(make_machine(4), memory_bytes=cores_gib << 30)
    plan = make_test_plan(node, {name: value for name, value in environ.items() if name.startswith("LAUNCH_")})
    if not refused:
        check_model_memory(given, shape, plan, node)
        return
    with pytest.raises(UserError, match=r"^TRAIN_MODEL=\w+: has [\d,]+ weights for [\dx]+ images, which take") as error:
        check_model_memory(given, shape, plan, node)
    assert error.value.code == ExitCode.MACHINE


def test_gpu_memory_counts_on_gpus() -> None:
    node = replace(make_machine(4, gpus=2), memory_bytes=1 << 50)
    plan = make_test_plan(node, {})
    with pytest.raises(UserError, match="a GPU has 128"):
        check_model_memory(read_train_settings({}, {}), PLENTY, plan, node)
