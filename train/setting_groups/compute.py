"""How a step is computed, on one rank or many."""

from typing import Annotated, Literal

from msgspec import Meta

from entrypoint.core.setting_types import about
from entrypoint.core.settings_base import Auto, Settings


class ComputeSettings(Settings, frozen=True, kw_only=True):
    """How a step is computed, on one rank or many."""

    precision: Annotated[
        Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"],
        about(
            "bf16 and fp16 use autocast with fp32 weights; tf32 is for GPUs. fp8 is bf16 with linear layers"
            " in fp8, for Hopper and later, by torchao. auto: bf16 where it is faster.",
            basic=True,
            evaluate="own",
        ),
    ] = "fp32"
    compile: Annotated[
        Literal["off", "default", "reduce-overhead", "max-autotune", "auto"],
        about("torch.compile and its mode. auto measures whether compilation pays off.", basic=True),
    ] = "off"
    compile_backend: Annotated[
        Annotated[str, Meta(pattern=r"^[\w.-]{1,100}$", title="the name of a backend")],
        about("Backend of torch.compile."),
    ] = "inductor"
    ipex: Annotated[
        Literal["auto", "on", "off"],
        about("Intel Extension for PyTorch. auto: off, because it gave no speedup."),
    ] = "auto"
    deterministic: Annotated[bool, about("Use deterministic kernels only; slower on CUDA.", evaluate="own")] = False
    channels_last: Annotated[bool, about("Use the channels-last memory format.", evaluate="adopted")] = True
    winograd: Annotated[
        Literal["auto", "on", "off"],
        about(
            "Winograd's algorithm for 3x3 convolutions on CPUs, in fp32: fewer multiplications."
            " auto: on CPUs with AVX2 and without AVX-512."
        ),
    ] = "auto"
    sync_batchnorm: Annotated[
        Auto | bool,
        about("Compute BatchNorm statistics over all ranks. auto and 1: yes. 0: each rank its own."),
    ] = "auto"
    ddp_find_unused_parameters: Annotated[
        bool,
        about("DDP's find_unused_parameters: set to 1 if some parameters get no gradient in a step."),
    ] = False
    parallelism: Annotated[
        Literal["ddp", "fsdp"],
        about("ddp replicates the model. fsdp (FSDP2) shards parameters, gradients and optimizer state."),
    ] = "ddp"
