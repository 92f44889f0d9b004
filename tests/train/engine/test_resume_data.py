"""A run resumes on the data that it was trained on, in its own place, or says what differs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, needs_two_cores
from tests.train.given import SMALL, imagefolder

pytestmark = pytest.mark.launch
QUIET = {"LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0"}
ALLOWED = {"TRAIN_RESUME_ALLOW_CHANGED": "1"}


def cut_after_first_epoch(entrypoint: Entrypoint, env: dict[str, str]) -> None:
    """Train, and remove all checkpoints but the first epoch's, as if the run had been killed then."""
    entrypoint.train(env=env | {"TRAIN_KEEP_CHECKPOINTS": "99"})
    entrypoint.cut()


def remove_images(folder: Path) -> None:
    for path in folder.glob("train/*/00[2-7].*"):
        path.unlink()


def double_images(folder: Path) -> None:
    for path in list(folder.glob("train/*/*")):
        shutil.copy(path, path.with_name(f"b{path.name}"))


def change_bytes(folder: Path) -> None:
    """Change an image, but neither its name nor its size."""
    path = next(folder.glob("train/class1/*.jpg"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def rename_image(folder: Path) -> None:
    path = next(folder.glob("train/class1/*"))
    path.rename(path.with_name(f"x{path.name}"))


@pytest.mark.slow_except("remove_images")
@pytest.mark.parametrize("source", ["memory", pytest.param("stream", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("change", "said", "allowed"),
    [
        (remove_images, "6 training images instead of 24", 2),  # fewer than a batch
        pytest.param(double_images, "48 training images instead of 24", 0, marks=pytest.mark.slow),
        (change_bytes, "files of the same names have other bytes", 0),
        pytest.param(rename_image, "files have other names or classes", 0, marks=pytest.mark.slow),
    ],
)
def test_resume_on_changed_images_is_refused(
    entrypoint: Entrypoint, image_folder: Path, source: str, change: Callable[[Path], None], said: str, allowed: int
) -> None:
    env = imagefolder(image_folder, TRAIN_RUN_NAME="run", TRAIN_EPOCHS="3", TRAIN_DATA_SOURCE=source) | QUIET
    cut_after_first_epoch(entrypoint, env)
    change(image_folder)
    assert said in entrypoint.error_line("train", env=env | {"TRAIN_RESUME": "auto"}) or allowed == 2
    named = {"TRAIN_RESUME": "runs/run", "TRAIN_RUN_NAME": "", "TRAIN_EVAL_EVERY": "2"}  # which only settings follow
    assert said in entrypoint.error_line("train", env=env | named) or allowed == 2
    again = entrypoint("train", env=env | ALLOWED | {"TRAIN_RESUME": "auto"})
    assert again.code == allowed, again.err
    if not allowed:
        steps = len(list(image_folder.glob("train/*/*"))) // 8
        assert entrypoint.summary("run")["steps"] == 3 * steps
        assert f"resuming although {said}" in again.out
        assert "train loss 0.0000" not in again.out


@pytest.mark.slow
def test_other_source_normalizes_as_the_checkpoint_did(entrypoint: Entrypoint, image_folder: Path) -> None:
    env = imagefolder(image_folder, TRAIN_RUN_NAME="run", TRAIN_EPOCHS="3") | QUIET
    whole = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "whole", "TRAIN_DATA_SOURCE": "memory"})
    cut_after_first_epoch(entrypoint, env | {"TRAIN_DATA_SOURCE": "memory"})
    stream = env | {"TRAIN_DATA_SOURCE": "stream", "TRAIN_RESUME": "auto"}
    assert entrypoint.train(env=stream)["weights_sha256"] == whole["weights_sha256"]
    again = entrypoint.train(env=env | {"TRAIN_RESUME": "auto"})
    assert (again["test_accuracy"], again["test_loss"]) == (whole["test_accuracy"], whole["test_loss"])


@pytest.mark.parametrize(
    ("batch_size", "steps"),
    [("100", 18), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("32", 60), ("128", 15)))],
)
def test_changed_batch_size_keeps_the_epochs(entrypoint: Entrypoint, batch_size: str, steps: int) -> None:
    env = SMALL | QUIET | {"TRAIN_EPOCHS": "3", "TRAIN_RUN_NAME": "run"}
    cut_after_first_epoch(entrypoint, env)
    again = env | ALLOWED | {"TRAIN_RESUME": "auto", "TRAIN_BATCH_SIZE": batch_size}
    result = entrypoint.succeed("train", env=again)
    assert entrypoint.summary("run")["steps"] == steps
    assert f"resuming although TRAIN_BATCH_SIZE was 64, is {batch_size}" in result.out
    assert [line.split()[1] for line in result.out.splitlines() if "train loss" in line] == ["2/3", "3/3"]
    assert "train loss 0.0000" not in result.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "now", "code", "said"),
    [
        ({}, {"TRAIN_MODEL": "resnet18"}, 2, "TRAIN_MODEL was cnn, is resnet18. The checkpoint fits no other value"),
        (
            {},
            {"TRAIN_MODEL_ARGS": "bias=0"},
            2,
            "TRAIN_MODEL_ARGS was unset, is bias=0. The checkpoint fits no other value",
        ),
        ({}, {"TRAIN_OPTIMIZER": "adam"}, 2, "TRAIN_OPTIMIZER was sgd, is adam. The checkpoint fits no other value"),
        ({}, {"TRAIN_SYNTHETIC_SHAPE": "1x16x16"}, 2, "is of another model: "),
        ({}, {"TRAIN_SYNTHETIC_SHAPE": "3x8x8"}, 2, "is of another model: "),
        ({}, {"TRAIN_EMA_DECAY": "0.9"}, 0, "resuming although TRAIN_EMA_DECAY was 0.0, is 0.9"),
        ({"TRAIN_EMA_DECAY": "0.9"}, {}, 0, "resuming although TRAIN_EMA_DECAY was 0.9, is 0.0"),
        ({}, {"TRAIN_PRECISION": "fp16"}, 0, "resuming although TRAIN_PRECISION was fp32, is fp16"),
        ({"TRAIN_PRECISION": "fp16"}, {}, 0, "resuming although TRAIN_PRECISION was fp16, is fp32"),
        ({}, {"TRAIN_PARALLELISM": "fsdp"}, 0, "resuming although TRAIN_PARALLELISM was ddp, is fsdp"),
        ({"TRAIN_PARALLELISM": "fsdp"}, {}, 0, "resuming although TRAIN_PARALLELISM was fsdp, is ddp"),
        (
            {"TRAIN_PRUNE_RATIO": "0.5", "TRAIN_PRUNE_WARMUP": "0"},
            {},
            2,
            "RATIO was 0.5, is 0.0. The checkpoint fits",
        ),
        ({}, {"TRAIN_WEIGHT_DECAY": "0.3"}, 0, "resuming although TRAIN_WEIGHT_DECAY was 0.0005, is 0.3"),
        ({}, {"TRAIN_MOMENTUM": "0"}, 0, "resuming although TRAIN_MOMENTUM was 0.9, is 0.0"),
        ({"TRAIN_MOMENTUM": "0"}, {}, 0, "resuming although TRAIN_MOMENTUM was 0.0, is 0.9"),
    ],
)
def test_allowed_change_is_mapped_or_refused_in_one_line(
    entrypoint: Entrypoint, saved: dict[str, str], now: dict[str, str], code: int, said: str
) -> None:
    if "TRAIN_PRUNE_RATIO" in saved:
        pytest.importorskip("torch_pruning")
    env = SMALL | QUIET | {"TRAIN_EPOCHS": "2", "TRAIN_RUN_NAME": "run"}
    cut_after_first_epoch(entrypoint, env | saved)
    kept = entrypoint.summary("run")["weights_sha256"]
    result = entrypoint("train", env=env | now | ALLOWED | {"TRAIN_RESUME": "auto"})
    assert result.code == code, result.err
    assert said in (result.err if code else result.out)
    assert len(result.error_lines) <= bool(code)
    if not code:
        assert entrypoint.summary("run")["steps"] == 20
        moves = {"TRAIN_WEIGHT_DECAY", "TRAIN_MOMENTUM"} & {*saved, *now}
        assert not moves or entrypoint.summary("run")["weights_sha256"] != kept


def swap_classes(folder: Path) -> None:
    """Swap the images of two classes, so that names, numbers and sizes of most stay."""
    for split in ("train", "test"):
        one, other, kept = (folder / split / name for name in ("class0", "class1", "kept"))
        for source, target in ((one, kept), (other, one), (kept, other)):
            source.rename(target)


MAKE_NET = """
ip link set lo up
ip link add net0 type veth peer name net1
ip link set net0 up
ip link set net1 up
ip address add 10.99.0.1/24 dev net0
"""
# Two nodes with a rank each, and each with its own copy of the data.
TWO_NODES = f"""{MAKE_NET}
export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.99.0.1
for rank in 0 1; do
  (
    export RANK=$rank TRAIN_CACHE_DIR=cache$rank
    eval "export TRAIN_DATA_DIR=\\$DATA_OF_$rank"
    [ "$rank$SETTING_OF_1" = 1 ] || [ $rank = 0 ] || export "${{SETTING_OF_1?}}"
    code=0
    "$1" -m entrypoint train >$rank.out 2>$rank.err || code=$?
    echo $code >$rank.code
  ) &
done
wait
"""


def two_nodes(entrypoint: Entrypoint, env: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the exit codes and the errors of two nodes with addresses of their own on this host."""
    words = ("unshare", "--net", "sh", "-ec", TWO_NODES, "sh", PYTHON)
    if not shutil.which("ip") or subprocess.run([*words[:4], MAKE_NET], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace (root) and iproute2's ip")
    subprocess.run(
        words,
        cwd=entrypoint.folder,
        env={**clean_environment(), "SETTING_OF_1": "", **env, "HOME": str(entrypoint.home)},
        check=True,
        timeout=LAUNCH_LIMIT_S,
    )
    codes, errors = (
        [(entrypoint.folder / f"{rank}.{name}").read_text() for rank in (0, 1)] for name in ("code", "err")
    )
    return codes, errors


@pytest.mark.slow_except("swap_classes")
@needs_two_cores
@pytest.mark.parametrize("source", ["memory", pytest.param("stream", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_classes, "files of the same names have other bytes"),
        pytest.param(remove_images, "6 training images instead of 24", marks=pytest.mark.slow),
        pytest.param(change_bytes, "files of the same names have other bytes", marks=pytest.mark.slow),
        (lambda _: None, ""),
    ],
)
def test_nodes_with_other_data_are_refused(
    entrypoint: Entrypoint, image_folder: Path, source: str, change: Callable[[Path], None], said: str
) -> None:
    other = image_folder.with_name("other")
    shutil.copytree(image_folder, other)
    change(other)
    env = imagefolder(image_folder, TRAIN_DATA_SOURCE=source, TRAIN_BATCH_SIZE="4", TRAIN_EPOCHS="1") | QUIET
    env |= {"LAUNCH_CPU_BINDING": "none", "DATA_OF_0": str(image_folder), "DATA_OF_1": str(other)}
    codes, errors = two_nodes(entrypoint, env)
    assert codes == (["2\n"] * 2 if said else ["0\n"] * 2), errors
    for err in errors:
        errors_of_rank = [line for line in err.splitlines() if " failed first: " not in line]
        assert len(errors_of_rank) == bool(said), err
        assert said in err
        assert not said or " (rank 1) has other data than " in err


@needs_two_cores
@pytest.mark.slow_except("TRAIN_LR")
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        # These tell two runs on the same nodes apart, so they are compared before the ranks start.
        ("TRAIN_LR=0.2", "the nodes disagree: "),
        pytest.param("TRAIN_SEED=3", "the nodes disagree: ", marks=pytest.mark.slow),
        pytest.param("TRAIN_BATCH_SIZE=8", "the nodes disagree: ", marks=pytest.mark.slow),
        pytest.param("TRAIN_EPOCHS=2", "the nodes disagree: ", marks=pytest.mark.slow),
        pytest.param("TRAIN_MODEL=speednet-half", "the nodes disagree: ", marks=pytest.mark.slow),
        ("TRAIN_WEIGHT_DECAY=0.1", "TRAIN_WEIGHT_DECAY: is 0.1 on "),
        ("TRAIN_DATA_SOURCE=stream", "TRAIN_DATA_SOURCE: is stream on "),
        ("TRAIN_TENSORBOARD=0", ""),
    ],
)
def test_nodes_with_other_settings_are_refused(
    entrypoint: Entrypoint, image_folder: Path, setting: str, said: str
) -> None:
    env = imagefolder(image_folder, TRAIN_BATCH_SIZE="4", TRAIN_EPOCHS="1") | QUIET
    env |= {"LAUNCH_CPU_BINDING": "none", "DATA_OF_0": str(image_folder), "DATA_OF_1": str(image_folder)}
    codes, errors = two_nodes(entrypoint, env | {"SETTING_OF_1": setting})
    assert codes == (["2\n"] * 2 if said else ["0\n"] * 2), errors
    for err in errors:
        assert said in err
        assert (setting in err) == said.startswith("the nodes")
        assert "Traceback" not in err


def rename_class(folder: Path) -> None:
    """Rename the first class, so that it becomes the last one."""
    for split in ("train", "test"):
        (folder / split / "class0").rename(folder / split / "zebra")


def add_class(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split / "class3").symlink_to("class2")


@pytest.mark.parametrize(
    ("change", "said", "allowed"),
    [
        (rename_class, "saved with other data: class 0 of 3 was class0, is class1 of 3.", 2),
        pytest.param(
            add_class, "saved with other data: class 3 of 3 was none, is class3 of 4, ", 2, marks=pytest.mark.slow
        ),
    ],
)
def test_resume_with_other_classes_is_refused(
    entrypoint: Entrypoint, image_folder: Path, change: Callable[[Path], None], said: str, allowed: int
) -> None:
    env = imagefolder(image_folder, TRAIN_RUN_NAME="run", TRAIN_EPOCHS="1", LAUNCH_QUIET="1")
    entrypoint.train(env=env)
    change(image_folder)
    again = env | {"TRAIN_RESUME": "auto"}
    assert said in entrypoint.error_line("train", env=again)
    assert entrypoint("train", env=again | {"TRAIN_RESUME_ALLOW_CHANGED": "1"}).code == allowed
