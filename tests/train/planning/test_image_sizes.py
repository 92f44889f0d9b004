"""Sizes of training and evaluation: what a step sees, what is refused, and that runs with them train and resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from tests.conftest import Entrypoint, paint, refusal
from tests.factories import train_settings
from train.data.dataset_info import DatasetInfo
from train.planning.image_sizes import check_image_sizes, decide_image_sizes, image_sizes, parse_schedule, scale_shape
from train.setting_groups.data import DataSettings
from train.settings import read_train_settings
from train.transforms.normalize import resize_batch

BIG = DatasetInfo(100, (3, 224, 224))


@pytest.mark.parametrize(
    ("text", "ends", "last"),
    [("", (), 0), ("128:0.5,224", ((0.5, 128),), 224), ("96:.25,128:0.5,160", ((0.25, 96), (0.75, 128)), 160)],
)
def test_schedule_is_parsed(text: str, ends: tuple[tuple[float, int], ...], last: int) -> None:
    assert parse_schedule(text) == (ends, last)


def test_each_step_has_its_size() -> None:
    sizes = image_sizes(train_settings(size_schedule="96:0.25,128:0.5,224").data, (3, 224, 224))
    sides = [sizes.train_shape(step, 8)[1] for step in range(8)]
    assert sides == [96, 96, 128, 128, 128, 128, 224, 224]
    assert sizes.other_shapes == ((3, 96, 96), (3, 128, 128))


def test_shapes_keep_their_aspect_ratio() -> None:
    assert scale_shape((3, 48, 64), 24) == (3, 24, 32)
    assert scale_shape((1, 65, 50), 25) == (1, 32, 25)


@pytest.mark.slow
@pytest.mark.launch
def test_books_crops_are_evaluated_at_their_size(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_IMAGES": "20", "TRAIN_TRANSFORMS": "book"}
    entrypoint.train("--steps=1", "--batch-size=2", env=env)
    assert image_sizes(DataSettings(transforms="book"), (3, 32, 32)).eval == (3, 224, 224)


def test_files_are_decoded_to_the_larger_size() -> None:
    settings = train_settings(image_size=176, eval_size=224)
    sizes = image_sizes(settings.data, (3, 224, 224))
    assert (sizes.decoded, sizes.train, sizes.eval) == ((3, 224, 224), (3, 176, 176), (3, 224, 224))
    assert sizes.other_shapes == ((3, 224, 224),)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TRAIN_SIZE_SCHEDULE": "128:0.5,192"}, "ends with 192, and the images have 224"),
        ({"TRAIN_SIZE_SCHEDULE": "224:0.5,224"}, "all of its sizes are 224, so it has no effect"),
        ({"TRAIN_SIZE_SCHEDULE": "256:0.5,224"}, "256 is larger than the images, which have 224"),
        ({"TRAIN_SIZE_SCHEDULE": "128:0.5,160:0.5,224"}, "its fractions add up to 1, so 224 is never trained"),
        ({"TRAIN_SIZE_SCHEDULE": "96:0.7,128:0.2,160:0.1,224"}, "its fractions add up to 1, so 224 is never trained"),
        ({"TRAIN_SIZE_SCHEDULE": "128:0.5,224", "TRAIN_TRANSFORMS": "book"}, "contradict: the book's have one size"),
        ({"TRAIN_EVAL_SIZE": "256"}, "needs TRAIN_IMAGE_SIZE, the size of training"),
        ({"TRAIN_EVAL_SIZE": "256", "TRAIN_DATASET": "digits"}, "only image files are resized"),
    ],
)
def test_sizes_that_contradict_are_refused(env: dict[str, str], said: str) -> None:
    given = read_train_settings({"TRAIN_DATASET": "imagefolder", **env}, {})
    message = refusal(check_image_sizes, given, BIG)
    assert said in message
    assert message.startswith(next(iter(env)))


@pytest.mark.parametrize("text", ["128", "128:0.5", "128:1.5,224", "128:0.5;224", "0:0.5,224", "a:0.5,224"])
def test_no_schedule_is_refused(text: str) -> None:
    refusal(read_train_settings, {"TRAIN_SIZE_SCHEDULE": text}, {}, match=r"TRAIN_SIZE_SCHEDULE=.*SIDE:FRACTION,SIDE")


def test_resize_equals_torchvision() -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    images = torch.randn(2, 3, 40, 56)
    wanted = functional.resize(images, [20, 28], antialias=True)
    torch.testing.assert_close(resize_batch(images, (3, 20, 28)), wanted)
    assert resize_batch(images, (3, 40, 56)) is images


@pytest.fixture
def larger_images(tmp_path: Path) -> Path:
    folder = tmp_path / "larger"
    paint(folder / "train", each=8, size=(40, 40))
    paint(folder / "test", each=4, size=(40, 40))
    return folder


def sized(folder: Path, **more: str) -> dict[str, str]:
    return {
        "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(folder), "TRAIN_MODEL": "speednet-half",
        "TRAIN_BATCH_SIZE": "8", "TRAIN_EPOCHS": "4", "TRAIN_IMAGE_SIZE": "32", "TRAIN_LR": "0.01", **more,
    }  # fmt: skip


SCHEDULE = {"TRAIN_SIZE_SCHEDULE": "16:0.25,24:0.25,32", "TRAIN_EVAL_SIZE": "40"}


@pytest.mark.launch
@pytest.mark.slow_except("memory")
@pytest.mark.parametrize("source", ["memory", "stream"])
def test_run_with_sizes_resumes_to_the_same_bits(entrypoint: Entrypoint, larger_images: Path, source: str) -> None:
    env = sized(
        larger_images, **SCHEDULE, TRAIN_DATA_SOURCE=source, TRAIN_CHECKPOINT_EVERY="1", TRAIN_KEEP_CHECKPOINTS="4"
    )
    whole = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "whole"})
    folder = entrypoint.folder / "runs/whole/checkpoint"
    for path in sorted(folder.glob("step-*"))[1:]:
        shutil.rmtree(path)
    again = entrypoint.succeed("train", env=env | {"TRAIN_RUN_NAME": "whole", "TRAIN_RESUME": "auto"})
    assert "resuming from" in again.out
    assert entrypoint.summary("whole")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.launch
@pytest.mark.slow
def test_later_commands_evaluate_at_the_same_size(entrypoint: Entrypoint, larger_images: Path) -> None:
    summary = entrypoint.train(env=sized(larger_images, TRAIN_EVAL_SIZE="40", TRAIN_RUN_NAME="a", TRAIN_EXPORT="onnx"))
    found: dict[str, float] = {}
    for side in ("", "--eval-size=32", "--eval-size=48"):
        result = entrypoint.succeed("evaluate", "runs/a", "--json", *filter(None, [side]))
        found[side] = json.loads(result.out)["loss"]
    assert found[""] == pytest.approx(summary["test_loss"], rel=1e-4)
    assert len({round(one, 6) for one in found.values()}) == 3
    entrypoint.succeed("predict", "runs/a", larger_images / "test")
    for words in (("evaluate", "runs/a", "--eval-size=5"), ("plan", "train", "--evaluate=runs/a", "--eval-size=5")):
        assert "--eval-size=5: speednet-half does not take images of 5x5" in entrypoint.error_line(*words)
    assert "IMAGE_SIZE=24: the model was trained on 3x32x32. Unset it, or set TRAIN_EVAL_SIZE" in entrypoint.error_line(
        "evaluate", "runs/a", "--image-size=24"
    )
    onnx = pytest.importorskip("onnx")
    (given,) = onnx.load(str(entrypoint.folder / "runs/a/model.onnx")).graph.input
    assert [one.dim_value for one in given.type.tensor_type.shape.dim][2:] == [40, 40]


@pytest.mark.launch
@pytest.mark.slow_except("more1")
@pytest.mark.parametrize("more", [{"TRAIN_SIZE_SCHEDULE": "16:0.5,32"}, {"TRAIN_EVAL_SIZE": "64"}])
def test_model_of_one_size_is_refused_by_the_plan(
    entrypoint: Entrypoint, larger_images: Path, more: dict[str, str]
) -> None:
    ((name, value),) = more.items()
    for words in (("plan", "train"), ("train",)):
        line = entrypoint.error_line(*words, env=sized(larger_images) | {"TRAIN_MODEL": "cnn"} | more)
        assert f"error: {name}={value}: cnn does not take images of" in line


@pytest.mark.launch
def test_plan_names_the_sizes(entrypoint: Entrypoint, larger_images: Path) -> None:
    made = entrypoint.plan("train", env=sized(larger_images, **SCHEDULE))
    decisions = {one["key"]: one for one in made["decisions"]}
    assert decisions["image sizes"]["value"] == "16:0.25,24:0.25,32"
    said = "files are decoded to 40 pixels, and training resizes them to 32"
    assert said in decisions["evaluation size"]["reason"]
    with Image.open(next((larger_images / "test").rglob("*.png"))) as image:
        assert image.size == (40, 40)


@pytest.mark.launch
@pytest.mark.usefixtures("torchvision")
def test_smallest_micro_batch_is_checked_at_each_size(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_SHAPE": "3x64x64", "TRAIN_SYNTHETIC_IMAGES": "40"}
    more = {"TRAIN_MODEL": "resnet18", "TRAIN_BATCH_SIZE": "1", "TRAIN_SIZE_SCHEDULE": "4:0.5,64", "TRAIN_STEPS": "4"}
    assert "needs 2 images per micro-batch" in entrypoint.error_line("train", env=env | more)


def test_sizes_are_explained_once() -> None:
    own = read_train_settings({"TRAIN_SIZE_SCHEDULE": "16:0.5,32"}, {})
    by_recipe = replace(own, sources={})
    facts = DatasetInfo(100, (3, 32, 32))
    texts = [one.text for given in (own, by_recipe) for one in decide_image_sizes(given, facts)]
    assert texts == [
        "(set by you) TRAIN_SIZE_SCHEDULE=16:0.5,32; resized on the device",
        "by the recipe; resized on the device",
    ]
