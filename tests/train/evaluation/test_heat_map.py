"""Heat is where the class comes from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from train.evaluation.heat_map import MAX_PROJECTED_CLASSES, features_by_class, heat_maps, show_heat
from train.models.registry import build_model
from train.setting_groups.network import NetworkSettings
from train.transforms.normalize import Normalize


class Corners(nn.Module):
    """Sees class 0 in the upper left quarter of an image, and class 1 in the lower right one."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Identity()
        mask = torch.zeros(2, 8, 8)
        mask[0, :4, :4] = mask[1, 4:, 4:] = 1
        self.mask = nn.Buffer(mask)

    def forward(self, images: Tensor) -> Tensor:
        seen: Tensor = self.features(images * self.mask)
        return seen.mean((2, 3))


def test_heat_is_on_the_part_that_decides() -> None:
    heat = heat_maps(Corners(), torch.ones(2, 1, 8, 8), torch.tensor([0, 1]))
    assert heat is not None
    assert heat.shape == (2, 8, 8)
    assert heat[0, :4, :4].min() == heat[1, 4:, 4:].min() == 1
    assert heat[0, 4:].max() == heat[1, :4].max() == 0


@pytest.mark.slow_except("cnn")
@pytest.mark.parametrize(
    ("name", "has_maps"), [("cnn", True), ("mobilenet_v2", True), ("timm:vit_tiny_patch16_224", False)]
)
def test_only_networks_with_maps_of_features_have_heat(name: str, has_maps: bool) -> None:
    if name != "cnn":
        pytest.importorskip("timm" if name.startswith("timm") else "torchvision")
    shape = (3, 32, 32) if has_maps else (3, 224, 224)
    model = build_model(NetworkSettings(model=name), shape, 4).eval().requires_grad_(requires_grad=False)
    heat = heat_maps(model, torch.randn(2, *shape), torch.tensor([0, 1]))
    assert (heat is not None) == has_maps


@pytest.mark.parametrize("classes", [("dark", "bright"), tuple(map(str, range(MAX_PROJECTED_CLASSES + 1)))])
def test_images_of_a_class_are_near_each_other(classes: tuple[str, ...]) -> None:
    normalize = Normalize.from_stats(torch.tensor([128.0]), torch.tensor([64.0]), torch.device("cpu"))
    labels = torch.tensor([0, 1, -100] * 20)  # the last one fills a batch
    pixels = (torch.randint(0, 40, (60, 1, 8, 8)) + 200 * (labels == 1).view(-1, 1, 1, 1)).to(torch.uint8)
    sample = [*zip(pixels.split(25), labels.split(25), strict=True)]
    pooled = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, len(classes), 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for model in (build_model(NetworkSettings(model="cnn"), (1, 8, 8), len(classes)), pooled):
        check_places(features_by_class(model, sample, classes, normalize), classes)
        assert features_by_class(model, [], classes, normalize) == {}
        assert not any(module._forward_pre_hooks for module in model.modules()), "no later pass is recorded"
    assert not features_by_class(Corners(), sample, classes, normalize), "it has no weights that give the outputs"


def check_places(found: dict[str, list[list[float]]], classes: tuple[str, ...]) -> None:
    assert {name: len(places) for name, places in found.items()} == (
        {"dark": 20, "bright": 20} if len(classes) == 2 else {}
    )
    if found:
        across = {name: [place[0] for place in places] for name, places in found.items()}
        low, high = sorted(across.values(), key=min)
        assert max(low) < min(high)


def test_heat_is_shown_in_red_over_the_image() -> None:
    heat = torch.zeros(4, 4)
    heat[0, 0] = 1
    shown = show_heat(torch.full((1, 4, 4), 100, dtype=torch.uint8), heat)
    assert shown[:, 0, 0].tolist() == [193, 40, 40]
    assert shown[:, 1, 1].tolist() == [100, 100, 100]
