"""What `reference_training` gives to Python: every kind of image the same answer, and one line for what cannot be."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import reference_training
from reference_training import RunError, TrainedModel, load_model, plan, train
from tests.conftest import Entrypoint, clean_environment, script

pytestmark = pytest.mark.launch
TRAINING = {"TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_SHAPE": "3x16x16", "TRAIN_EPOCHS": "1", "LAUNCH_QUIET": "1"}
RANDOM = np.random.default_rng(0).integers(0, 256, (20, 24, 4), dtype=np.uint8)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first = Entrypoint(tmp_path_factory.mktemp("finished"))
    first.train("--run-name=a", env=TRAINING)
    return first.folder / "runs/a"


@pytest.fixture
def model(finished: Path) -> TrainedModel:
    return load_model(finished)


TURNED = Image.Exif()
TURNED[0x0112] = 6
COLOR = Image.fromarray(RANDOM[:, :, :3])
FILES: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "turned.jpg": (COLOR, {"exif": TURNED}),
    "turned.png": (COLOR, {"exif": TURNED}),
    "transparent.png": (Image.fromarray(RANDOM), {}),
    "palette.png": (COLOR.quantize(16), {"transparency": 3}),
    "gray.png": (COLOR.convert("L"), {}),
    "deep.png": (Image.fromarray(RANDOM[:, :, 0].astype(np.uint16) * 257), {}),
}


@pytest.mark.parametrize("name", FILES)
def test_path_content_and_opened_image_give_one_answer(model: TrainedModel, tmp_path: Path, name: str) -> None:
    image, options = FILES[name]
    path = tmp_path / name
    image.save(path, **options)
    expected = model.preprocess([path])
    for other in (str(path), path.read_bytes(), Image.open(path)):
        # Turned before or after it is resized, a pixel is rounded by one of 255.
        torch.testing.assert_close(model.preprocess([other]), expected, rtol=0, atol=0.03)


def test_arrays_are_images(model: TrainedModel) -> None:
    gray = RANDOM[:, :, :1]
    expected = model.predict([Image.fromarray(gray[:, :, 0]), COLOR], top=10)
    assert model.predict([gray, RANDOM[:, :, :3]], top=10) == expected
    assert [len(answer) for answer in expected] == [len(model.classes)] * 2
    assert model.predict([]) == []


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda model: model.predict("cat.jpg"), TypeError, "images are a list"),
        (lambda model: model.predict(RANDOM), TypeError, "images are a list"),
        (lambda model: model.predict([None]), TypeError, "image 0: is NoneType, and no path"),
        (lambda model: model.predict(["nobody.jpg"]), ValueError, "nobody.jpg: No such file"),
        (lambda model: model.predict([b"no image"]), ValueError, "image 0: not an image"),
        (lambda model: model.predict([COLOR, RANDOM.astype(float)]), ValueError, "image 1: .*is float64 of shape"),
        (lambda model: model.predict([RANDOM.transpose(2, 0, 1)]), ValueError, r"of shape \(4, 20, 24\)"),
        (lambda model: model.predict([COLOR], top=0), ValueError, "top and batch_size are 1 or more"),
        (lambda model: model.preprocess([]), ValueError, "there are no images"),
        (pickle.dumps, TypeError, "call load_model where it is used"),
        (lambda _: load_model("nobody"), RunError, "nobody: no such file"),
        (lambda _: plan(dataset="digits", epochs=-1), RunError, "^--epochs=-1: not a whole number"),
        (lambda _: plan("nobody"), RunError, "^--data-dir=nobody: no such folder"),
        (lambda _: plan(json=False), TypeError, "json is no setting"),
        (lambda _: train("photos", data_dir="others"), TypeError, "data_dir is no setting"),
    ],
)
def test_what_cannot_be_is_one_line(model: TrainedModel, call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert getattr(caught.value, "code", 2) == 2


def test_model_is_a_module_of_torch(model: TrainedModel) -> None:
    assert not model.training
    inputs = model.preprocess([COLOR])
    copied = deepcopy(model)
    with torch.inference_mode():
        torch.testing.assert_close(copied(inputs), model(inputs))
        for parameter in copied.parameters():
            parameter.zero_()
        assert not torch.equal(copied(inputs), model(inputs)), "the copy has weights of its own"
    ((name, share),) = model.predict([COLOR])[0]
    ((halved, other),) = deepcopy(model).to(torch.bfloat16).predict([COLOR])[0]
    assert (halved, other) == (name, pytest.approx(share, abs=0.05))
    model.network = torch.nn.Sequential(model.network, torch.nn.Softmax(1))
    ((_, flat),) = model.predict([COLOR])[0]
    assert flat < share, "what replaces the network predicts"


def test_rank_of_a_job_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunError, match="RANK is set: this process is a rank of a job"):
        plan()


def test_names_are_shown_before_they_are_used() -> None:
    assert set(reference_training.__all__) <= set(dir(reference_training))


INTERRUPTED = """
from reference_training import train
try:
    train(dataset="digits", epochs=100000, run_name="long", tensorboard=False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
run = train(dataset="digits", steps=1, run_name="short", progress="off", output_dir="others")
print(run.folder.is_absolute(), run.folder.name)
"""


def test_interrupt_is_raised_when_the_run_has_saved(tmp_path: Path) -> None:
    program = script(tmp_path, "x.py", INTERRUPTED)
    env = {**clean_environment(), "HOME": str(tmp_path), "LAUNCH_QUIET": "1"}
    with subprocess.Popen(
        [sys.executable, program], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout
        lines = iter(started.stdout)
        next(line for line in lines if "epoch 2/" in line)
        os.kill(started.pid, signal.SIGINT)
        rest = list(lines)
    assert started.returncode == 0
    saved = next(line for line in rest if "is saved in" in line)
    assert rest.index(saved) < rest.index("interrupted\n")
    assert rest[-1] == "True short\n"
    assert rest[-2] == "interrupted\n", "progress=off prints nothing"
