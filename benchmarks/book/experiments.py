"""The experiments, one per result table of the book: variants of settings, the book's figures, its conclusion.

The book's seconds and accuracies are those of its published notebooks, and None where these have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.book.measure import NODES, Measured

# Medians that differ by less are not distinguished, whatever their spread is.
NOISE = 0.05
# Accuracies of one seed on several numbers of ranks may differ by this many points.
FLAT_POINTS = 0.5

Conclusion = Callable[[Mapping[str, Measured]], str]


@dataclass(frozen=True)
class Variant:
    """Named settings, with the book's seconds and accuracy in percent if it has them."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    book_seconds: float | None = None
    book_accuracy: float | None = None


@dataclass(frozen=True)
class Experiment:
    """Variants that alternate; the others are compared with the first.

    `claim` is what the book concludes, and `conclusion` returns whether that holds here.
    `curve` is the value of the plot over the variants, images/s or accuracy; without it there is no plot.
    `few` uses a part of the images if all of them would take hours. Its accuracy has little meaning then.
    """

    chapter: str
    title: str
    claim: str
    variants: Sequence[Variant]
    conclusion: Conclusion
    curve: str = ""
    few: bool = False


def faster(variant: str, than: str) -> Conclusion:
    """Return the conclusion whether one variant is faster than another."""

    def conclusion(seen: Mapping[str, Measured]) -> str:
        if variant not in seen or than not in seen:
            return "Not to be seen here: a variant is missing."
        ratio = seen[variant].speed / seen[than].speed
        figures = f"{ratio:.2f} times as many images a second, {variant} against {than}"
        if ratio > 1 + NOISE:
            return f"Holds here: {figures}."
        return f"Does not hold here: {figures}{'' if ratio < 1 - NOISE else ', which is noise'}."

    return conclusion


def worse_with_ranks(seen: Mapping[str, Measured]) -> str:
    """Return whether accuracy decreases with the number of ranks."""
    if len(seen) < 2:
        return "Not to be seen here: variants are missing."
    accuracies = [one.accuracy for one in seen.values()]
    lost = accuracies[0] - min(accuracies)
    words = f"{', '.join(f'{value:.2f} %' for value in accuracies)}"
    if max(accuracies) - min(accuracies) <= FLAT_POINTS:
        return f"Does not hold here, as it should not: {words}; the global batch stays what it is."
    return f"Holds here: {words}, {lost:.2f} points are lost."


def fewer_parameters(seen: Mapping[str, Measured]) -> str:
    """Return how many parameters pruning leaves, and its cost."""
    first, *others = seen.values()
    words = "; ".join(
        f"{one.parameters:,} parameters, {one.speed / first.speed:.2f} times as fast,"
        f" {one.accuracy - first.accuracy:+.2f} points"
        for one in others
    )
    return f"Of {first.parameters:,}: {words}."


CNN = {"TRAIN_MODEL": "cnn"}
CCL = {"LAUNCH_BACKEND": "ccl"}
TWO = {"LAUNCH_NPROC_PER_NODE": "2"}
ON_GPUS = {"LAUNCH_DEVICE": "cuda", "TRAIN_MODEL": "efficientnet_b7"}
STREAMED = {"TRAIN_DATA_SOURCE": "stream"}
# Resized to 224 x 224. The network is small, so that the data pipeline dominates on a CPU.
SEVEN_TASKS = {"TRAIN_TRANSFORMS": "book", "TRAIN_MODEL": "shufflenet_v2_x0_5"}
MANY = {"LAUNCH_OVERSUBSCRIBE": "1", "LAUNCH_CPU_BINDING": "none", "LAUNCH_THREADS": "1"}
UNPLANNED = {"LAUNCH_CPU_BINDING": "none", "LAUNCH_ALLOCATOR": "system", "TRAIN_CHANNELS_LAST": "0"}

EXPERIMENTS = (
    Experiment(
        "2", "Bias", "Without biases in the first layers training is faster, and accuracy the same.",
        (Variant("with bias", {}, 183, 82.98), Variant("without bias", {"TRAIN_BIAS": "0"}, 122, 83.57)),
        faster("without bias", "with bias"),
    ),
    Experiment(
        "2", "Batch size", "Batches of 256 train faster than batches of 64, for some accuracy.",
        (Variant("64", {}, 183, 82.98), Variant("256", {"TRAIN_BATCH_SIZE": "256"}, 76, 80.01)),
        faster("256", "64"), "images/s",
    ),
    Experiment(
        "2", "OpenMP", "Threads bound to cores of their own train faster than unbound ones.",
        (Variant("unbound", UNPLANNED, 183, 82.98), Variant("planned", {}, 98, 84.34)),
        faster("planned", "unbound"),
    ),
    Experiment(
        "3.1", "Compiling", "A compiled model takes longer at first and trains faster then.",
        (Variant("eager", CNN, 2264, 74.26), Variant("inductor", CNN | {"TRAIN_COMPILE": "default"}, 1407, 79.9)),
        faster("inductor", "eager"),
    ),
    Experiment(
        "3.2", "Backends", "Of the backends inductor is the fastest.",
        tuple(
            Variant(name, {"TRAIN_COMPILE": "default", "TRAIN_COMPILE_BACKEND": name}, seconds, accuracy)
            for name, seconds, accuracy in (
                ("eager", 2264, 74.26), ("inductor", 1407, 79.9), ("cudagraphs", 2290, 77.57), ("ipex", None, None),
                ("onnxrt", None, None), ("tvm", None, None),
            )
        ),
        faster("inductor", "eager"),
    ),
    Experiment(
        "4", "OpenMP: default, bound, Intel's", "Binding helps, and Intel's runtime helps more.",
        (
            Variant("default", {"LAUNCH_CPU_BINDING": "none", "LAUNCH_OPENMP": "gnu"}),
            Variant("GNU's, bound", {"LAUNCH_OPENMP": "gnu"}), Variant("Intel's, bound", {"LAUNCH_OPENMP": "intel"}),
        ),
        faster("Intel's, bound", "GNU's, bound"),
    ),
    Experiment(
        "4", "Intel's extension", "IPEX trains faster than plain PyTorch on the CPU.",
        (Variant("plain", {}), Variant("IPEX", {"TRAIN_IPEX": "on"})), faster("IPEX", "plain"),
    ),
    Experiment(
        "5", "Data pipeline", "Loader workers take a complex pipeline out of the way of the training.",
        (
            *(Variant(f"{count} workers", STREAMED | {"TRAIN_NUM_WORKERS": str(count)}) for count in (0, 1, 2)),
            Variant("from memory"),
        ),
        faster("2 workers", "0 workers"), "images/s",
    ),
    Experiment(
        "5", "The book's seven tasks", "Loader workers take a complex pipeline out of the way of the training.",
        (
            *(Variant(f"{count}"
                      " workers", SEVEN_TASKS | STREAMED | {"TRAIN_NUM_WORKERS": str(count)}) for count in (0, 2)),
            Variant("from memory", SEVEN_TASKS),
        ),
        faster("2 workers", "0 workers"), few=True,
    ),
    Experiment(
        "6.1", "Sparsity", "Half of the filters can go for little accuracy: of 2,122,186 parameters 1,059,306 stay.",
        (
            Variant("whole"),
            *(Variant(f"{share} by {by}", {"TRAIN_PRUNE_RATIO": str(share), "TRAIN_PRUNE_BACKEND": by})
              for by, shares in (("torch-pruning", (0.3, 0.5, 0.7)), ("nni", (0.5,))) for share in shares),
        ),
        fewer_parameters, "accuracy",
    ),
    Experiment(
        "7", "Mixed precision", "16 bits train faster, on hardware that has units for them.",
        (
            Variant("fp32"), Variant("bf16", {"TRAIN_PRECISION": "bf16"}),
            Variant("fp16 on a GPU", {"TRAIN_PRECISION": "fp16", "LAUNCH_DEVICE": "cuda"}),
        ),
        faster("bf16", "fp32"),
    ),
    Experiment(
        "9.1", "Threads", "More threads train faster, ever less so.",
        tuple(Variant(f"{count} thread{'s' * (count > 1)}", {"LAUNCH_THREADS": str(count)}) for count in (1, 2)),
        faster("2 threads", "1 thread"), "images/s",
    ),
    Experiment(
        "9.2", "Ranks and threads on the CPU", "Several ranks of few threads train faster than one rank of many, and"
        " accuracy falls with their number.",
        (Variant("1 rank x 2"), Variant("2 ranks x 1", TWO), Variant("2 ranks x 1, ccl", TWO | CCL)),
        faster("2 ranks x 1", "1 rank x 2"),
    ),
    Experiment(
        "9.2", "Accuracy by ranks", "Accuracy falls with the number of ranks, 5 to 15 points.",
        (Variant("1"), *(Variant(str(count), MANY | {"LAUNCH_NPROC_PER_NODE": str(count)}) for count in (2, 4))),
        worse_with_ranks, "accuracy",
    ),
    Experiment(
        "10.2", "GPUs", "Several GPUs train faster, and accuracy falls with their number.",
        tuple(
            Variant(f"GPUs: {count}", ON_GPUS | {"LAUNCH_GPUS": str(count)}) for count in (1, 2)
        ),
        worse_with_ranks,
    ),
    Experiment(
        "11", "Nodes", "Several machines train faster, and accuracy falls with their number.",
        (Variant("1 node"), Variant("2 nodes, on this machine", {NODES: "2"})), worse_with_ranks,
    ),
)  # fmt: skip
