"""What becomes of a trained model: `evaluate` and `predict`, from a run, a checkpoint or a file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import Entrypoint, needs_two_cores, paint
from tests.train.given import TWO_RANKS, imagefolder
from train.evaluation.predict import Prediction, write_csv

pytestmark = pytest.mark.launch

QUIET = {"LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0"}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on three classes of painted images."""
    first = Entrypoint(tmp_path_factory.mktemp("trained"))
    for split, each in (("train", 8), ("test", 4)):
        paint(first.folder / "images" / split, each=each)
    env = imagefolder(first.folder / "images", TRAIN_EPOCHS="4", TRAIN_EMA_DECAY="0.5") | QUIET
    first.train("--run-name=a", env=env)
    return first.folder / "runs/a"


@pytest.fixture
def trained(entrypoint: Entrypoint, finished_run: Path) -> Path:
    """Return a copy of the run, which a test may change."""
    return shutil.copytree(finished_run, entrypoint.folder / "runs/a", symlinks=True)


def test_run_leaves_weights_and_an_evaluation(entrypoint: Entrypoint, trained: Path) -> None:
    values = json.loads((trained / "evaluation.json").read_text())
    assert values["classes"] == ["class0", "class1", "class2"]
    assert sum(map(sum, values["confusion"])) == values["images"] == 12
    right = sum(values["confusion"][one][one] for one in range(3))
    assert values["accuracy"] == pytest.approx(100 * right / 12) == entrypoint.summary("a")["test_accuracy"]
    assert set(values["class_accuracy"]) == {"class0", "class1", "class2"}
    average = load_file(trained / "checkpoint/step-000000012/ema.safetensors")
    state = load_file(trained / "model.safetensors")
    assert all(state[name].equal(average[f"module.{name}"]) for name in state)


@pytest.mark.slow_except("checkpoint")
@pytest.mark.parametrize("what", ["", "model.safetensors", "checkpoint/step-000000012"])
@pytest.mark.parametrize("ranks", [{}, pytest.param(TWO_RANKS, marks=needs_two_cores)])
def test_evaluation_finds_the_accuracy_of_the_run(
    entrypoint: Entrypoint, trained: Path, what: str, ranks: dict[str, str]
) -> None:
    words, own = ("evaluate", trained / what), json.loads((trained / "evaluation.json").read_text())
    found = json.loads(entrypoint.succeed(*words, "--json", env=ranks).out)
    assert found["confusion"] == own["confusion"]
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-4)
    assert f"accuracy  {own['accuracy']:.2f} % of 12 images" in entrypoint.succeed(*words, env=QUIET | ranks).out


def test_evaluation_on_other_data_goes_by_the_names_of_classes(
    entrypoint: Entrypoint, trained: Path, image_folder: Path
) -> None:
    other = entrypoint.folder / "other"
    shutil.copytree(image_folder / "test", other)
    shutil.rmtree(other / "class0")
    words, own = ("evaluate", trained, "--data-dir", other), json.loads((trained / "evaluation.json").read_text())
    found = json.loads(entrypoint.succeed(*words, "--json", env=QUIET).out)
    assert found["confusion"] == [[0, 0, 0], *own["confusion"][1:]]
    (other / "class2").rename(other / "zebra")
    for command in (words, ("plan", "--evaluate", trained, "--data-dir", other)):
        assert "the model knows no class zebra; it knows class0, class1, class2" in entrypoint.error_line(
            *command, env=QUIET
        )


def test_run_is_evaluated_as_it_read_its_images_from_any_folder(entrypoint: Entrypoint, image_folder: Path) -> None:
    for split in ("train", "test"):
        (image_folder / split / "class0/broken.png").write_text("no image")
    env = {**QUIET, "TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "run"}
    data = os.path.relpath(image_folder, entrypoint.folder)
    entrypoint.succeed("train", data, "--model=cnn", "--on-unreadable-image=skip", env=env)
    (entrypoint.folder / "elsewhere").mkdir()
    done = entrypoint("evaluate", "../runs/run", env=QUIET, cwd=entrypoint.folder / "elsewhere")
    assert "left out  1 unreadable image\n" in done.succeeded().out


def test_file_that_is_no_trained_model_is_refused(entrypoint: Entrypoint, trained: Path) -> None:
    plain = entrypoint.folder / "plain.safetensors"
    save_file(load_file(trained / "model.safetensors"), plain)
    for words, said in (
        (("evaluate", plain), "does not say its classes"),
        (("predict", plain, "a.png"), "does not say its classes"),
        (("plan", "--evaluate", entrypoint.folder / "nobody"), "no such file"),
    ):
        assert said in entrypoint.error_line(*words, env=QUIET)
    for words in (("evaluate", trained), ("predict", trained, "a.png")):
        line = entrypoint.error_line(*words, env=QUIET | {"TRAIN_MODEL": "resnet18"})
        assert "TRAIN_MODEL=resnet18: the weights are of " in line


def test_file_cannot_choose_code_to_import(entrypoint: Entrypoint, trained: Path) -> None:
    evil = entrypoint.folder / "evil"
    evil.mkdir()
    (evil / "evil_net.py").write_text("open('evil-was-here', 'w')\n")
    path = trained / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        origin = json.loads(file.metadata()["reference_training"])
    origin["settings"] |= {"model": "evil_net:make", "model_path": str(evil)}
    save_file(load_file(path), path, {"reference_training": json.dumps(origin)})
    for words in (("evaluate", path), ("predict", path, trained / "batch.png")):
        assert "a file may not choose" in entrypoint.error_line(*words, env=QUIET)
    assert not list(entrypoint.folder.rglob("evil-was-here"))


def predict(entrypoint: Entrypoint, *words: str | Path) -> Any:
    result = entrypoint.succeed("predict", *words, "--format=json", env=QUIET)
    return json.loads(result.out)


def test_predictions_are_those_of_the_evaluation(entrypoint: Entrypoint, trained: Path, image_folder: Path) -> None:
    found = predict(entrypoint, trained, image_folder / "test", "--top", "3", "--eval-batch-size=5")
    assert len(found) == 12
    confusion = json.loads((trained / "evaluation.json").read_text())["confusion"]
    counted = [[0] * 3 for _ in range(3)]
    for one in found:
        names = [prediction["class"] for prediction in one["predictions"]]
        shares = [prediction["probability"] for prediction in one["predictions"]]
        assert sorted(names) == ["class0", "class1", "class2"]
        assert sum(shares) == pytest.approx(1, abs=1e-4)
        assert shares == sorted(shares, reverse=True)
        counted[int(Path(one["file"]).parent.name[-1])][int(names[0][-1])] += 1
    assert counted == confusion


def test_bad_image_is_named_and_the_rest_goes_on(entrypoint: Entrypoint, trained: Path, image_folder: Path) -> None:
    good = next((image_folder / "test/class1").iterdir())
    bad = entrypoint.folder / "a\nb,c.png"
    bad.write_text("no image")
    result = entrypoint("predict", trained, bad, "nobody.jpg", good, "--format", "csv", env=QUIET)
    assert result.code == 2
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert [row["file"] for row in rows] == [str(good)]
    assert "a\\nb,c.png: not an image" in result.err
    assert "nobody.jpg: No such file or directory" in result.err
    assert "2 of 3 images cannot be read" in result.err
    table = entrypoint("predict", trained, good, env=QUIET)
    assert table.out.startswith(f"{good}  class")


@pytest.mark.slow
def test_pruned_and_gray_models_predict(entrypoint: Entrypoint, tmp_path: Path) -> None:
    for split in ("train", "test"):
        paint(tmp_path / "gray" / split, mode="L")
    env = imagefolder(tmp_path / "gray", TRAIN_PRUNE_RATIO="0.5", TRAIN_TRANSFORMS="imagenet") | QUIET
    entrypoint.train("--run-name=gray", env=env | {"TRAIN_BATCH_SIZE": "6"})
    found = predict(entrypoint, "runs/gray", tmp_path / "gray/test/class1")
    assert len(found) == 8


def test_json_switch_prints_json(entrypoint: Entrypoint, trained: Path, image_folder: Path) -> None:
    both = entrypoint.error_line("predict", trained, "a.jpg", "--json", "--format=csv")
    assert "--json and --format=csv contradict. Leave one out." in both
    result = entrypoint("predict", trained, image_folder / "test/class1", "--json", env=QUIET)
    assert len(json.loads(result.out)) == 4


@pytest.mark.parametrize(
    ("command", "variable", "use"),
    [
        ("evaluate", "TRAIN_AVERAGE", "average"),
        ("evaluate", "TRAIN_MAX_LOSS", "quantize"),
        ("quantize", "TRAIN_AVERAGE", "average"),
        ("average", "TRAIN_AVERAGE", "average"),
        ("average", "TRAIN_MAX_LOSS", "quantize"),
    ],
)
def test_settings_of_one_command_change_no_other(entrypoint: Entrypoint, command: str, variable: str, use: str) -> None:
    said = f"{variable}=1: is not for `{command}`. Unset it, or use `entrypoint {use}`."
    assert said in entrypoint.error_line(command, "runs/a", env={variable: "1"})


@pytest.mark.parametrize("words", [("evaluate",), ("predict",), ("predict", "runs/a")])
def test_missing_words_say_what_to_type(entrypoint: Entrypoint, words: tuple[str, ...]) -> None:
    assert f"Use `entrypoint {words[0]} RUN" in entrypoint.error_line(*words)


@pytest.mark.parametrize("ranks", [{}, pytest.param(TWO_RANKS, marks=[needs_two_cores, pytest.mark.slow])])
def test_test_time_augmentation_holds_for_later_commands(
    entrypoint: Entrypoint, image_folder: Path, ranks: dict[str, str]
) -> None:
    env = imagefolder(image_folder, TRAIN_TEST_TIME_AUGMENT="flip-shift", TRAIN_RUN_NAME="six")
    summary = entrypoint.train(env=env | ranks)
    six = json.loads(entrypoint.succeed("evaluate", "runs/six", "--json").out)
    assert six["loss"] == pytest.approx(summary["test_loss"], abs=1e-4)
    one = json.loads(entrypoint.succeed("evaluate", "runs/six", "--json", "--test-time-augment=off").out)
    assert one["loss"] != six["loss"]
    result = entrypoint.succeed("predict", "runs/six", image_folder / "test", "--format=json", "--top=3")
    shares = {Path(line["file"]): line["predictions"] for line in json.loads(result.out)}
    wanted = {path: path.parent.name for path in shares}
    loss = -sum(
        math.log(next(share["probability"] for share in found if share["class"] == wanted[path]))
        for path, found in shares.items()
    ) / len(shares)
    assert loss == pytest.approx(six["loss"], abs=1e-4)


def test_features_have_a_row_for_each_image(entrypoint: Entrypoint, trained: Path, image_folder: Path) -> None:
    min((image_folder / "test").rglob("*.*")).write_bytes(b"broken")
    done = entrypoint("predict", trained, image_folder / "test", "--features=f.npy", "--format=json")
    listed = json.loads(done.out)
    table = np.load(entrypoint.folder / "f.npy")
    assert table.shape == (len(listed), 512)
    assert (
        np.isnan(table).any(1).tolist()
        == [row == 0 for row in range(len(listed))]
        == ["error" in each for each in listed]
    )
    head = load_file(trained / "model.safetensors")
    logits = table @ head["fc2.weight"].numpy().T + head["fc2.bias"].numpy()
    for each, row in zip(listed[1:], logits[1:], strict=True):
        assert each["predictions"][0]["class"] == f"class{row.argmax()}"
    for path, more, problem in (("no/f.npy", "off", "no such folder"), ("f.npy", "flip", "an image has one row")):
        words = ("predict", trained, image_folder, f"--features={path}", f"--test-time-augment={more}")
        assert problem in entrypoint.error_line(*words)


def test_cells_of_a_csv_are_no_formulas() -> None:
    out = io.StringIO()
    names = ("=HYPERLINK(1)", "+1", "-1", "@x", "cat", "a\x1b[31mb\nc")
    others = (Prediction(Path("of no label"), ()), Prediction(Path("small"), (("age", 1.5e-22),), kind="value"))
    write_csv(iter([Prediction(Path(names[0]), tuple((name, 0.5) for name in names)), *others]), out)
    *rows, last, small = list(csv.reader(io.StringIO(out.getvalue())))[1:]
    assert (last, small[3]) == (["of no label", "", "", ""], "1.5e-22")
    assert {row[0] for row in rows} == {"'=HYPERLINK(1)"}
    assert [row[2] for row in rows] == ["'=HYPERLINK(1)", "'+1", "'-1", "'@x", "cat", r"a\x1b[31mb\nc"]


@pytest.mark.parametrize(
    ("verb", "place"),
    [("evaluate", "> /dev/full"), ("predict", "> /dev/full"), ("runs", "> /dev/full"), ("report", "| true")],
)
def test_results_that_cannot_be_written_are_one_line(
    entrypoint: Entrypoint, trained: Path, verb: str, place: str
) -> None:
    words = ["-m", "entrypoint", verb, str(trained), *(["../images/test"] if verb == "predict" else [])]
    (entrypoint.folder / "a").mkdir()
    paint(entrypoint.folder / "images/test", each=1)
    line = f"{shlex.join([sys.executable, *words])} {place}"
    done = entrypoint("-c", line, env=QUIET, cwd=entrypoint.folder / "a", command=("sh",))
    said = (
        "entrypoint: error: standard output: cannot be written (No space left on device). Write it to another place.\n"
    )
    assert (done.code, done.err) == ((0, "") if "true" in place else (3, said))
