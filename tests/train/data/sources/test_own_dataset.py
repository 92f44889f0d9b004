"""Data sets that are code of the user's: what they may give, and what is said of others."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Entrypoint, needs_two_cores, refusal
from tests.factories import train_settings
from tests.train.given import TWO_RANKS, imagefolder, losses
from train.data.cache.fingerprint import digest_of_file, fingerprint_of_files
from train.data.dataset_info import inspect_dataset
from train.data.decoding.decoder import read_image
from train.data.sources.image_file import read_file
from train.data.sources.image_list import UnreadableImage
from train.data.sources.own_dataset import list_own_splits
from train.settings import TrainSettings

MODULE = '''
import os
from pathlib import Path
import numpy as np
from PIL import Image

print("a module may print")
FOLDER = Path(os.environ.get("OWN_IMAGES", "."))

class Folder:
    """The painted images of a folder, as files, arrays or encoded bytes."""

    def __init__(self, split, kind):
        self.files = sorted((FOLDER / split).rglob("*.*"))
        self.classes = sorted({file.parent.name for file in self.files})
        self.kind = kind

    def __len__(self):
        return len(self.files)

    def __getitem__(self, row):
        file = self.files[row]
        label = self.classes.index(file.parent.name)
        if self.kind == "bytes":
            return file.read_bytes(), label
        image = Image.open(file)
        return np.asarray(image) if self.kind == "array" else image, np.int64(label)

def folder(split, kind="bytes"):
    return None if split == "val" else Folder(split, kind)

def pil_images(split): return folder(split, "image")
def arrays(split): return folder(split, "array")

PIXELS = [np.full((8, 8, 3), 40 * row, np.uint8) for row in range(6)]
def words(split): return [(pixels, "ab"[row % 2]) for row, pixels in enumerate(PIXELS)]
def numbers(split): return [(pixels, row % 3 + 9) for row, pixels in enumerate(PIXELS)]
def ages(split): return [(pixels, 10.5 * row) for row, pixels in enumerate(PIXELS)]

class Several(list):
    classes = ["a", "b"]
def several(split): return Several((pixels, [row % 2, 1]) for row, pixels in enumerate(PIXELS))

def class_numbers(split): return Several((pixels, [row % 2, 2]) for row, pixels in enumerate(PIXELS))
def no_number(split): return [(pixels, float("nan") if row == 3 else row) for row, pixels in enumerate(PIXELS)]
class Turned(list):
    targets, target_transform = [0, 1] * 3, staticmethod(lambda label: 1 - label)
def turned(split): return Turned((pixels, 1 - row % 2) for row, pixels in enumerate(PIXELS))

class Broken(list):
    classes, targets = ["a", "b"], [0, 1, 0, 1, 0, 1]
    def __getitem__(self, row):
        if row == 3:
            raise KeyError("lost")
        return super().__getitem__(row)
def broken(split): return Broken(words(split))
class Marked(Broken):
    fingerprint = "version 7"
def marked(split): return Marked(words(split))

class Wrong(list):
    classes = ["a", "b"]
def wrong_label(split): return Wrong([(PIXELS[0], 0), (PIXELS[1], 2)])
def wrong_pair(split): return [(PIXELS[0], 1, 2)]
def wrong_image(split): return [("a.jpg", 1)]
def wrong_array(split): return [(PIXELS[0] / 255, 1)]
def wrong_split(split): return words(split) if split == "train" else numbers(split)
def nothing(split): return []
def no_test(split): return words(split) if split == "train" else None
def raises(split): raise RuntimeError("no disk")
def no_split(): return []
'''


@pytest.fixture
def own(tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a module of data sets."""
    (tmp_path / "own_data.py").write_text(MODULE)
    monkeypatch.setenv("OWN_IMAGES", str(image_folder))
    yield tmp_path
    sys.modules.pop("own_data", None)
    sys.path[:] = [one for one in sys.path if one != str(tmp_path)]


def settings_of(folder: Path, name: str, **more: object) -> TrainSettings:
    return train_settings({"dataset": f"own_data:{name}", "model_path": folder, **more})


@pytest.mark.parametrize("name", ["folder", "pil_images", "arrays"])
def test_images_of_all_kinds_have_the_pixels_of_files(own: Path, image_folder: Path, name: str) -> None:
    train, test = list_own_splits(settings_of(own, name))
    assert (len(train), len(test), train.classes) == (24, 12, ("class0", "class1", "class2"))
    files = sorted((image_folder / "train").rglob("*.*"))
    for row in (0, 9, 23):
        assert train.classes[train.labels[row]] == files[row].parent.name
        assert np.array_equal(read_image(train.files[row], (3, 16, 16)), read_image(files[row], (3, 16, 16)))
    assert str(train.files[9]) == f"own_data:{name} train:9"
    assert test.val_start is None


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr"])
def test_images_of_all_modes_are_read_bit_for_bit(own: Path, mode: str) -> None:
    from train.data.sources.own_dataset import encoded_image

    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert("L" if mode.startswith("I;") else mode)
    if mode.startswith("I;"):
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    content = encoded_image(settings_of(own, "words").data, "train", 0, image)
    with Image.open(io.BytesIO(content)) as again:
        assert again.mode == mode
        assert np.array_equal(np.asarray(again), np.asarray(image))


@pytest.mark.parametrize(
    ("name", "classes", "labels"),
    [
        ("words", ("a", "b"), [0, 1, 0, 1, 0, 1]),
        ("numbers", ("9", "10", "11"), [0, 1, 2, 0, 1, 2]),
        ("turned", ("0", "1"), [1, 0, 1, 0, 1, 0]),
    ],
)
def test_labels_name_the_classes(own: Path, name: str, classes: tuple[str, ...], labels: list[int]) -> None:
    train, test = list_own_splits(settings_of(own, name))
    assert (train.classes, list(train.labels)) == (classes, labels)
    assert (len(test), test.val_start) == (12, 6)  # the function has a val split too


def test_targets_of_other_tasks(own: Path) -> None:
    train, _ = list_own_splits(settings_of(own, "several", task="multilabel"))
    assert (train.classes, list(train.labels), list(train.targets.values)) == (("a", "b"), [0, 1] * 3, [0, 1, 1, 1])
    train, _ = list_own_splits(settings_of(own, "ages", task="regress"))
    assert train.classes == ("value0",)
    assert list(train.targets.values) == [10.5 * row for row in range(6)]


@pytest.mark.parametrize(
    ("name", "task", "said"),
    [
        (
            "class_numbers",
            "multilabel",
            r"train\[0\] has the label \[0, 2\], which is no row of 0 and 1 for each label",
        ),
        ("no_number", "regress", r"train\[3\] has the label nan, which is no row of numbers below 1e30"),
    ],
)
def test_targets_that_cannot_be_learned_are_one_line(own: Path, name: str, task: str, said: str) -> None:
    refusal(list_own_splits, settings_of(own, name, task=task), match=said)


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_transparent_color_of_an_image_is_no_color(own: Path, tmp_path: Path, mode: str) -> None:
    from train.data.sources.own_dataset import encoded_image

    Image.new(mode, (4, 4)).save(tmp_path / "x.png", transparency=(0, 0, 0) if mode == "RGB" else 0)
    with Image.open(tmp_path / "x.png") as image:
        content = encoded_image(settings_of(own, "words").data, "train", 0, image)
    assert np.asarray(Image.open(io.BytesIO(content)))[0, 0, 3] == 0


@pytest.mark.launch
def test_plan_asks_a_child_process(own: Path) -> None:
    found = inspect_dataset(settings_of(own, "arrays"))
    assert (found.images, found.train_images, found.shape, found.class_counts) == (36, 24, (3, 16, 16), (8, 8, 8))
    assert "own_data" not in sys.modules


def test_fingerprint_is_what_the_data_set_says_or_its_content(own: Path) -> None:
    listings = list_own_splits(settings_of(own, "marked"))
    assert listings[0].files.shards[0].state == "version 7"
    assert digest_of_file(listings[0].files[0]) != digest_of_file(listings[0].files[1])
    before = fingerprint_of_files(list_own_splits(settings_of(own, "words")), 0)
    (own / "own_data.py").write_text(MODULE.replace("40 * row", "10 + 40 * row"))  # .pyc files know sizes and seconds
    sys.modules.pop("own_data")
    assert fingerprint_of_files(list_own_splits(settings_of(own, "words")), 0) != before


def test_what_an_item_raises_is_one_line_with_its_index(own: Path) -> None:
    train, _ = list_own_splits(settings_of(own, "marked"))
    bad = read_image(train.files[3], (3, 8, 8))
    assert isinstance(bad, UnreadableImage)
    assert str(bad).startswith("own_data:marked train:3: ")
    assert "raised KeyError: 'lost' in own_data.py, line" in str(bad)
    assert read_file(train.files[2])


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "[3] raised KeyError: 'lost' in own_data.py"),
        ("wrong_label", "train[1] has the label 2"),
        ("wrong_pair", "[0] is tuple and not (image, label)"),
        ("wrong_image", "train[0] is str of no pixels and not a PIL image"),
        ("wrong_array", "train[0] is ndarray of float64 and not a PIL image, a uint8 array"),
        ("wrong_split", "the classes of split=test differ from those of train"),
        ("nothing", "has no images for split=train"),
        ("no_test", "gives nothing for split=test"),
        ("raises", "raised RuntimeError: no disk in own_data.py"),
        ("no_split", "raised TypeError"),
        ("nobody", "no nobody in own_data"),
    ],
)
def test_data_set_that_cannot_be_used_is_one_line(own: Path, name: str, said: str) -> None:
    for look in (list_own_splits, inspect_dataset):
        message = refusal(look, settings_of(own, name))
        assert message.startswith(f"TRAIN_DATASET=own_data:{name}: ")
        assert said in message


@pytest.mark.launch
@needs_two_cores
@pytest.mark.slow_except("stream")
@pytest.mark.parametrize("source", ["memory", "stream"])
def test_own_data_train_as_a_folder_does(entrypoint: Entrypoint, own: Path, image_folder: Path, source: str) -> None:
    env = imagefolder(image_folder, TRAIN_DATA_SOURCE=source, LAUNCH_QUIET="1", TRAIN_TENSORBOARD="0")
    entrypoint.train("--run-name=folder", env=env)
    del env["TRAIN_DATA_DIR"]
    env |= {"TRAIN_DATASET": "own_data:folder", "TRAIN_MODEL_PATH": str(own), "OWN_IMAGES": str(image_folder)}
    one = entrypoint.train("--run-name=one", "--keep-checkpoints=9", env=env)
    entrypoint.train("--run-name=two", env=env | TWO_RANKS)
    assert losses(entrypoint, "one") == losses(entrypoint, "folder")
    assert losses(entrypoint, "two") == pytest.approx(losses(entrypoint, "one"), rel=1e-3)
    entrypoint.cut("one")
    again = entrypoint.train("--run-name=one", "--resume=auto", env=env)
    assert again["weights_sha256"] == one["weights_sha256"]


@pytest.mark.launch
def test_file_of_a_run_cannot_choose_the_code_of_data(entrypoint: Entrypoint, own: Path, image_folder: Path) -> None:
    env = {"TRAIN_MODEL_PATH": str(own), "OWN_IMAGES": str(image_folder), "LAUNCH_QUIET": "1", "TRAIN_BATCH_SIZE": "8"}
    entrypoint.train("--run-name=run", "--epochs=1", "--dataset=own_data:folder", env=env)
    for words in (["evaluate", "runs/run"], ["train", "--resume", "runs/run"]):
        assert "its data set is the code own_data:folder, which a file may not choose" in entrypoint.error_line(
            *words, env=env
        )
    assert entrypoint("evaluate", "runs/run", "--dataset=own_data:folder", env=env).code == 0
