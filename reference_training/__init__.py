"""Plans, binds and launches PyTorch training on what a node really offers, with an accelerated trainer.

In an environment of the user's this is the only name that the project takes. Its other packages are in a folder that
only its own processes put on their path. docs/python.md shows what can be imported from here.
"""

TYPE_CHECKING = False  # as in `typing`, whose import costs each rank 5 ms
if TYPE_CHECKING:
    from reference_training.commands import Run, RunError, plan, train
    from reference_training.model import TrainedModel, load_model, predict

__version__ = "0.2.0"
__all__ = ["Run", "RunError", "TrainedModel", "load_model", "plan", "predict", "train"]

# What needs torch is apart, and is imported when it is asked for.
_OF_THE_MODEL = ("TrainedModel", "load_model", "predict")


def __dir__() -> list[str]:
    """Return the names that can be imported, for a notebook's Tab key."""
    return __all__


def __getattr__(name: str) -> object:
    """Import what Python asks for from the module that has it."""
    if name not in __all__:
        raise AttributeError(f"module 'reference_training' has no attribute {name!r}")
    from importlib import import_module

    module = "reference_training.model" if name in _OF_THE_MODEL else "reference_training.commands"
    return getattr(import_module(module), name)
