"""The memory that a model's weights need, where the size of the images decides on it; without torch."""

from __future__ import annotations

from entrypoint.core.errors import ExitCode, UserError, count_text
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.machine.detect import Machine
from entrypoint.plan.model import Plan
from train.planning.image_sizes import image_sizes
from train.planning.optimizers import SGD
from train.settings import ImageShape, TrainSettings

# Bytes of a weight: they are fp32 with every precision.
WEIGHT_BYTES = 4
LARGE_PIXELS = 224
# The share of memory that batches are planned with; the rest is for the libraries and other processes.
USABLE_SHARE = 0.8
# Tensors of the weights' size that an optimizer keeps; others are taken to keep one.
OPTIMIZER_STATES = {"sgd": 1, "adam": 2, "adamw": 2}
SPEEDNET_FILTERS = {"speednet": 64, "speednet-half": 32}
# Its three poolings and the whitening leave nothing of smaller images.
SPEEDNET_MIN_PIXELS = 9


def count_large_weights(model: str, shape: ImageShape) -> tuple[int, int]:
    """Return the trained and the fixed weights that grow with (channels, height, width), 0 for torchvision's models.

    Layers that do not grow are left out, so this is a lower bound.
    """
    channels, height, width = shape
    if model == "cnn":
        return 9 * channels * 32 + 64 * (height // 4) * (width // 4) * 512, 0
    if model in SPEEDNET_FILTERS:  # whitened patches of 2x2 pixels
        return 9 * 8 * channels * SPEEDNET_FILTERS[model], 8 * channels * 4 * channels
    return 0, 0


def model_input_shape(settings: TrainSettings, shape: ImageShape) -> ImageShape:
    """Return (channels, height, width) of the images that reach the model: the book's pipeline crops them."""
    if settings.transforms == "book":
        return shape[0], LARGE_PIXELS, LARGE_PIXELS
    return image_sizes(settings, shape).train


def weight_memory(settings: TrainSettings, shape: ImageShape) -> tuple[int, int]:
    """Return the number of those weights, and the bytes that they take on a rank.

    DDP also keeps gradients, optimizer states and the EMA on every rank. FSDP shards them.
    """
    trained, fixed = count_large_weights(settings.model, model_input_shape(settings, shape))
    copies = 1
    if settings.parallelism == "ddp":
        name = settings.optimizer.lower()
        states = 0 if name == SGD and not settings.momentum else OPTIMIZER_STATES.get(name, 1)
        copies += 1 + states + (settings.ema_decay > 0)
    return trained + fixed, WEIGHT_BYTES * (trained * copies + fixed)


def check_model_memory(given: ParsedSettings[TrainSettings], shape: ImageShape, plan: Plan, machine: Machine) -> None:
    """Raise `UserError` for a model whose weights do not fit into the memory of this node, or of a GPU."""
    count, needed = weight_memory(given.values, shape)
    ranks, memory, where = len(plan.ranks), machine.memory_bytes, "this node"
    if plan.device == "cuda":
        ranks, memory, where = min(ranks, 1), min((gpu.memory_bytes for gpu in machine.gpus), default=0), "a GPU"
    if not memory or needed * ranks <= memory:
        return
    size = "x".join(map(str, shape))
    lower = "TRAIN_SYNTHETIC_SHAPE" if given.values.dataset == "synthetic" else ""
    lower = "TRAIN_IMAGE_SIZE" if given.values.reads_files else lower
    raise UserError(
        f"TRAIN_MODEL={given.values.model}: has {count:,} weights for {size} images, which take"
        f" {needed * ranks / 2**30:,.1f} GiB on {count_text(ranks, 'rank')}, and {where} has {memory / 2**30:,.1f} GiB."
        f" Take another model{f', or lower {lower}' if lower else ''}.",
        ExitCode.MACHINE,
    )
