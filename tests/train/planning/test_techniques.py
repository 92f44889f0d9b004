"""The plan shows what is trained, and every technique that is on."""

from __future__ import annotations

import pytest

from train.data.dataset_info import KNOWN
from train.planning.model_report import ModelReport
from train.planning.techniques import TECHNIQUES, decide_techniques
from train.settings import TrainSettings, read_train_settings

ON = {
    "track": "mlflow", "eval_every": "2", "test_time_augment": "flip",
    "grad_accum_steps": "2", "mixup_alpha": "0.2", "cutmix_alpha": "1.0", "label_smoothing": "0.1", "ema_decay": "0.99",
    "max_grad_norm": "1.0", "prune_ratio": "0.5", "deterministic": "1",
    "export": "onnx", "profile": "3", "augment": "trivial", "erasing": "0.25", "repeated_augment": "3",
    "early_stopping": "3", "balance": "1", "class_weights": "auto",
    "loss": "focal", "skip_nonfinite": "5", "teacher": "runs/other",
}  # fmt: skip


def shown(environ: dict[str, str], dataset: str = "cifar10") -> dict[str, tuple[str, str]]:
    decisions = decide_techniques(read_train_settings(environ, {}), KNOWN[dataset], ModelReport())
    return {one.key: (one.value, one.text) for one in decisions}


def test_default_run_shows_model_optimizer_and_transforms() -> None:
    assert shown({}) == {
        "model": ("cnn", "the default"),
        "optimizer": ("sgd", "learning rate 0.05, schedule onecycle"),
        "transforms": ("flip-crop", "color images are flipped and shifted"),
    }
    assert shown({}, "digits")["transforms"][0] == "none"


@pytest.mark.parametrize("field", TECHNIQUES)
def test_technique_that_is_on_is_shown_with_its_setting(field: str) -> None:
    name = f"TRAIN_{field.upper()}"
    key, off, _ = TECHNIQUES[field]
    assert TrainSettings().value(field) == off
    assert key not in shown({})
    assert f"{name}={ON[field]}" in shown({name: ON[field]})[key][1]


def test_technique_without_effect_is_not_shown() -> None:
    assert "balance" not in shown({"TRAIN_BALANCE": "1", "TRAIN_TASK": "multilabel"})


def test_pruning_says_which_layers_and_when() -> None:
    made = shown({"TRAIN_PRUNE_RATIO": "0.5", "TRAIN_PRUNE_EXCLUDE": "layer1", "TRAIN_PRUNE_WARMUP": "3"})
    assert made["pruning"][1].endswith("of convolutions, but not layer1, after 3 epochs")
