"""The experiments, one per result table of the book: variants of settings, the book's figures, its conclusion.

The book's seconds and accuracies are those that it prints, and None where it prints none.
Rows of more cores than this machine has stay in the table, with that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.book.measure import CORES, NODES, Measured, speed_doubt

# Medians that differ by less are not distinguished, whatever their spread is.
NOISE = 0.05
# Accuracies of one seed on several numbers of ranks may differ by this many points.
FLAT_POINTS = 0.5

Conclusion = Callable[[Mapping[str, Measured]], str]


@dataclass(frozen=True)
class Variant:
    """Named settings, with the book's seconds and accuracy in percent if it has them.

    `needs_cores` are the physical cores that it needs. `gone` says why no PyTorch of today has it.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    book_seconds: float | None = None
    book_accuracy: float | None = None
    needs_cores: int = 1
    gone: str = ""


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
        if doubt := speed_doubt({name: seen[name] for name in (than, variant)}):
            return f"No conclusion on speed: {doubt}."
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
    doubt = speed_doubt(seen)
    words = "; ".join(
        f"{one.parameters:,} parameters, {'' if doubt else f'{one.speed / first.speed:.2f} times as fast, '}"
        f"{one.accuracy - first.accuracy:+.2f} points"
        for one in others
    )
    return f"Of {first.parameters:,}: {words}.{f' No conclusion on speed: {doubt}.' if doubt else ''}"


CNN = {"TRAIN_MODEL": "cnn"}
CCL = {"LAUNCH_BACKEND": "ccl"}
ON_GPUS = {"LAUNCH_DEVICE": "cuda", "TRAIN_MODEL": "efficientnet_b7"}
STREAMED = {"TRAIN_DATA_SOURCE": "stream"}
# Resized to 224 x 224. The network is small, so that the data pipeline dominates on a CPU.
SEVEN_TASKS = {"TRAIN_TRANSFORMS": "book", "TRAIN_MODEL": "shufflenet_v2_x0_5"}
MANY = {"LAUNCH_OVERSUBSCRIBE": "1", "LAUNCH_CPU_BINDING": "none", "LAUNCH_THREADS": "1"}
UNPLANNED = {"LAUNCH_CPU_BINDING": "none", "LAUNCH_ALLOCATOR": "system", "TRAIN_CHANNELS_LAST": "0"}
NVFUSER = "PyTorch 2.2 removed nvFuser"

# Table 6.1: share -> seconds, accuracy.
SPARSITIES = {
    0.1: (118, 47.26), 0.2: (113, 45.84), 0.3: (107, 44.66), 0.4: (100, 45.18), 0.5: (89, 42.71), 0.6: (84, 41.90),
    0.7: (81, 40.84), 0.8: (76, 38.87),
}  # fmt: skip
# Table 9.1: threads -> seconds; the book has 45.34 % for 16 threads.
THREADS = {1: 311, 2: 189, 4: 119, 8: 93, 12: 73, 16: 73}
# Tables 9.2 and 9.3, on 16 cores: ranks -> seconds, accuracy.
GLOO_RANKS = {2: (58, 44.01), 4: (45, 40.11), 8: (37, 38.63)}
CCL_RANKS = {2: (53, 43.12), 4: (42, 41.03), 8: (35, 37.99)}
# Table 10.2: GPUs -> seconds, accuracy.
GPUS = {
    1: (707, 78.76), 2: (393, 74.82), 3: (276, 72.70), 4: (208, 70.72), 5: (172, 68.34), 6: (142, 69.44),
    7: (122, 69.00), 8: (109, 68.82),
}  # fmt: skip
BOOK_CORES = 16


def thread_rows() -> tuple[Variant, ...]:
    """Return the rows of table 9.1, with this machine's number of cores among them."""
    counts = sorted({*THREADS, CORES})
    return tuple(
        Variant(
            plural(count, "thread"),
            {"LAUNCH_THREADS": str(count)},
            THREADS.get(count),
            45.34 if count == BOOK_CORES else None,
            needs_cores=count,
        )
        for count in counts
    )


def rank_rows(book: Mapping[int, tuple[float, float]], more: Mapping[str, str]) -> tuple[Variant, ...]:
    """Return rows of ranks x threads that fill this machine's cores, then those of the book's 16 cores."""
    here = [(ranks, CORES // ranks) for ranks in (1, *book) if ranks <= CORES]
    rows = {f"{ranks} x {threads}": (ranks, threads) for ranks, threads in here}
    rows |= {f"{ranks} x {BOOK_CORES // ranks}": (ranks, BOOK_CORES // ranks) for ranks in book}
    return tuple(
        Variant(
            name,
            {**(more if ranks > 1 else {}), "LAUNCH_NPROC_PER_NODE": str(ranks), "LAUNCH_THREADS": str(threads)},
            *(book.get(ranks, (None, None)) if ranks * threads == BOOK_CORES else (None, None)),
            needs_cores=ranks * threads,
        )
        for name, (ranks, threads) in rows.items()
    )


def plural(count: int, word: str) -> str:
    """Return `1 thread` or `2 threads`."""
    return f"{count} {word}{'s' * (count > 1)}"


MOST_RANKS = max(ranks for ranks in (1, *GLOO_RANKS) if ranks <= CORES)

EXPERIMENTS = (
    Experiment(
        "2", "Bias", "Without biases in the first layers training is faster, and accuracy the same.",
        (Variant("with bias", {}, 148, 83.99), Variant("without bias", {"TRAIN_MODEL_ARGS": "bias=0"}, 125, 83.76)),
        faster("without bias", "with bias"),
    ),
    Experiment(
        "2", "Batch size", "Batches of 256 train faster than batches of 64.",
        (
            Variant("64", {}, 148, 83.99), Variant("128", {"TRAIN_BATCH_SIZE": "128"}, 96),
            Variant("256", {"TRAIN_BATCH_SIZE": "256"}, 76),
        ),
        faster("256", "64"), "images/s",
    ),
    Experiment(
        "2", "OpenMP", "Threads bound to cores of their own train faster than unbound ones.",
        (Variant("unbound", UNPLANNED, 148, 83.99), Variant("planned", {}, 106, 83.25)),
        faster("planned", "unbound"),
    ),
    Experiment(
        "3", "Compiling the CNN", "A small model trains no faster compiled, since compilation takes its time.",
        (Variant("eager", CNN, 118), Variant("compiled", CNN | {"TRAIN_COMPILE": "default"}, 140)),
        faster("compiled", "eager"),
    ),
    Experiment(
        "3.1", "Compiling", "A compiled model takes longer at first and trains faster then.",
        (
            Variant("eager", CNN, 2264, 74.26), Variant("default", CNN | {"TRAIN_COMPILE": "default"}, 1443, 74.38),
            Variant("reduce-overhead", CNN | {"TRAIN_COMPILE": "reduce-overhead"}),
        ),
        faster("default", "eager"),
    ),
    Experiment(
        "3.2", "Backends", "Of the backends inductor is the fastest.",
        (
            *(
                Variant(name, {"TRAIN_COMPILE": "default", "TRAIN_COMPILE_BACKEND": name}, seconds, accuracy)
                for name, seconds, accuracy in (
                    ("eager", None, None), ("inductor", 1407, 79.90), ("cudagraphs", 2290, 77.57), ("ipex", None, None),
                    ("onnxrt", None, None), ("tvm", None, None),
                )
            ),
            Variant("aot_ts_nvfuser", {}, 2474, 74.68, gone=NVFUSER),
        ),
        faster("inductor", "eager"),
    ),
    Experiment(
        "4", "OpenMP: default, bound, Intel's", "Binding helps, and Intel's runtime helps more.",
        (
            Variant("default", {"LAUNCH_CPU_BINDING": "none", "LAUNCH_OPENMP": "gnu"}, 178),
            Variant("GNU's, bound", {"LAUNCH_OPENMP": "gnu"}, 114),
            Variant("Intel's, bound", {"LAUNCH_OPENMP": "intel"}, 102),
        ),
        faster("Intel's, bound", "GNU's, bound"),
    ),
    Experiment(
        "4", "Intel's extension", "IPEX trains faster than plain PyTorch on the CPU.",
        (Variant("plain", {}, 1318, 70), Variant("IPEX", {"TRAIN_IPEX": "on"}, 946)), faster("IPEX", "plain"),
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
        "5", "The book's seven tasks", "Loader workers and pinned memory take the pipeline out of the way.",
        (
            Variant("0 workers", SEVEN_TASKS | STREAMED | {"TRAIN_NUM_WORKERS": "0"}, 1892),
            Variant("2 workers", SEVEN_TASKS | STREAMED | {"TRAIN_NUM_WORKERS": "2"}, 846),
            Variant("from memory", SEVEN_TASKS),
        ),
        faster("2 workers", "0 workers"), few=True,
    ),
    Experiment(
        "6.1", "Sparsity", "Half of the filters can go for little accuracy: of 2,122,186 parameters 1,059,306 stay.",
        (
            Variant("whole", {}, 122, 47.10),
            *(
                Variant(f"{100 * share:.0f} %", {"TRAIN_PRUNE_RATIO": str(share)}, *figures)
                for share, figures in SPARSITIES.items()
            ),
        ),
        fewer_parameters, "accuracy",
    ),
    Experiment(
        "7", "Mixed precision", "16 bits train faster, on hardware that has units for them.",
        (
            Variant("fp32", {}, 811, 51), Variant("bf16", {"TRAIN_PRECISION": "bf16"}, 754),
            Variant("fp16 on a GPU", {"TRAIN_PRECISION": "fp16", "LAUNCH_DEVICE": "cuda"}, 486, 51),
        ),
        faster("bf16", "fp32"),
    ),
    Experiment(
        "9.1", "Threads", "More threads train faster, ever less so.",
        thread_rows(), faster(plural(CORES, "thread"), "1 thread"), "images/s",
    ),
    Experiment(
        "9.2", "Ranks and threads on the CPU", "Several ranks of few threads train faster than one rank of many.",
        rank_rows(GLOO_RANKS, {}), faster(f"{MOST_RANKS} x {CORES // MOST_RANKS}", f"1 x {CORES}"),
    ),
    Experiment(
        "9.2", "Accuracy by ranks", "Accuracy falls with the number of ranks, 5 to 15 points.",
        (
            Variant("1", {}, None, 45.34),
            *(
                Variant(str(count), MANY | {"LAUNCH_NPROC_PER_NODE": str(count)}, None, accuracy)
                for count, (_, accuracy) in GLOO_RANKS.items()
            ),
        ),
        worse_with_ranks, "accuracy",
    ),
    Experiment(
        "9.3", "Ranks and threads over oneCCL", "oneCCL trains a little faster than Gloo.",
        rank_rows(CCL_RANKS, CCL), faster(f"{MOST_RANKS} x {CORES // MOST_RANKS}", f"1 x {CORES}"),
    ),
    Experiment(
        "10.2", "GPUs", "Several GPUs train faster, and accuracy falls with their number.",
        tuple(
            Variant(f"GPUs: {count}", ON_GPUS | {"LAUNCH_NPROC_PER_NODE": str(count)}, *figures)
            for count, figures in GPUS.items()
        ),
        worse_with_ranks,
    ),
    Experiment(
        "11", "Nodes", "Several machines train faster, and accuracy falls with their number.",
        (
            Variant("1 node"), Variant("2 nodes, on this machine", {NODES: "2"}),
            Variant("16 GPUs of two nodes", ON_GPUS | {"LAUNCH_NPROC_PER_NODE": "16"}, 64, 63.73),
        ),
        worse_with_ranks,
    ),
)  # fmt: skip
