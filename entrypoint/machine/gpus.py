"""Read the GPUs that this process may use, their NUMA nodes and links from NVML; a missing driver is no error."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from entrypoint.machine.cpu_topology import read_number

# `nvidia-smi topo -m`, from the worst: across sockets, across host bridges of a node, over a host bridge, over
# several PCIe switches, over one. NV# is that many NVLinks, better than any of these; X is the GPU itself.
CLASSES = ("SYS", "NODE", "PHB", "PXB", "PIX")
SELF = "X"

# NVML's levels of a common ancestor, by our class; 0 is two GPUs of one board.
NVML_TOPOLOGY_CLASSES = {50: "SYS", 40: "NODE", 30: "PHB", 20: "PXB", 10: "PIX", 0: "PIX"}
DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")


class Gpu(Struct, frozen=True):
    """One visible GPU or MIG device; `index` counts the visible ones, as CUDA does.

    `capability` is its compute capability times ten; `node` is its NUMA node, None where the kernel knows none;
    `links` are the classes of `nvidia-smi topo -m` to every visible GPU in their order, itself included.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    node: int | None = None
    mig: bool = False
    capability: int = 0
    links: tuple[str, ...] = ()


class Driver(Struct, frozen=True):
    """NVIDIA's driver: its version, the newest CUDA that it serves, and NVML's error; empty without a driver."""

    version: str = ""
    cuda: str = ""
    problem: str = ""


def read_gpus(root: Path, visible: str | None = None, nvml: Any = None) -> tuple[tuple[Gpu, ...], Driver]:
    """Return the GPUs under CUDA_VISIBLE_DEVICES (indices, UUIDs or MIG ids) and the driver; no driver, no GPU.

    pynvml is only imported where a file of the driver exists, since importing it costs 0.06 s. `nvml` is what
    to ask in its place: a recording of another machine, whose files lie under `root`.
    """
    if nvml is None:
        if root != Path("/") or not any((root / name).exists() for name in DRIVER_FILES):
            return (), Driver()
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), Driver(problem=str(error))
    try:
        found = tuple(read_devices(root, nvml))
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        driver = str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        return (), Driver(problem=str(error))
    finally:
        nvml.nvmlShutdown()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    return filter_visible(found, chosen), Driver(driver, f"{cuda // 1000}.{cuda % 1000 // 10}")


def read_devices(root: Path, nvml: Any) -> Iterator[Gpu]:
    """Yield every GPU of the node in NVML's order, each in MIG mode replaced by its MIG devices.

    `index` is that of the whole GPU; `links` has one class for every one that is yielded.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    parts = [(parent, device) for parent in handles for device in list_mig_devices(nvml, parent) or (parent,)]
    switched = [count_nvlinks(nvml, handle) for handle in handles]
    table = {
        (a, b): link_class(nvml, handles, switched, a, b) for a in range(len(handles)) for b in range(len(handles))
    }
    parents = [handles.index(parent) for parent, _ in parts]
    for own, (parent, device) in enumerate(parts):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(parent)
        node = read_number(root / "sys/bus/pci/devices" / bus_id(nvml, parent) / "numa_node")
        yield Gpu(
            index=parents[own],
            uuid=nvml.nvmlDeviceGetUUID(device),
            name=nvml.nvmlDeviceGetName(device),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(device).total),
            node=node if node is not None and node >= 0 else None,  # the kernel has -1 for none
            mig=device is not parent,
            capability=10 * int(major) + int(minor),
            links=tuple(
                SELF if other == own else "PIX" if place == parents[own] else table[parents[own], place]
                for other, place in enumerate(parents)
            ),
        )


def list_mig_devices(nvml: Any, handle: Any) -> tuple[Any, ...]:
    """Return the MIG devices of a GPU, or none if it is not in MIG mode or too old for it."""
    found = []
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with suppress(nvml.NVMLError):  # slots without a device
                    found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return tuple(found)


def bus_id(nvml: Any, handle: Any) -> str:
    """Return a GPU's PCI address as /sys spells it: `0000:06:00.0`."""
    return short_address(nvml.nvmlDeviceGetPciInfo(handle).busId)


def short_address(address: Any) -> str:
    """Return a PCI address with four digits of domain, in lower case, where NVML has eight."""
    text = address.decode() if isinstance(address, bytes) else str(address)
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


SWITCH = "switch"


def count_nvlinks(nvml: Any, handle: Any) -> dict[str, int]:
    """Return how many active NVLinks a GPU has to each PCI address, those to NVSwitches together as `switch`."""
    counts: dict[str, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            there = (
                SWITCH
                if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
                else short_address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
            )
        except nvml.NVMLError:  # no such link on this GPU
            continue
        counts[there] = counts.get(there, 0) + 1
    return counts


def link_class(nvml: Any, handles: list[Any], links: list[dict[str, int]], a: int, b: int) -> str:
    """Return the class of the link between two GPUs, as `nvidia-smi topo -m` prints it."""
    if a == b:
        return SELF
    direct = links[a].get(bus_id(nvml, handles[b]), 0)
    count = direct or min(links[a].get(SWITCH, 0), links[b].get(SWITCH, 0))
    if count:
        return f"NV{count}"
    try:
        return NVML_TOPOLOGY_CLASSES.get(nvml.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b]), CLASSES[0])
    except nvml.NVMLError:
        return CLASSES[0]


def filter_visible(found: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order, stopping at the first unknown one.

    Those are CUDA's own rules (CUDA C++ programming guide, environment variables), as is that a process sees
    one MIG device at most, and no other GPU besides it (MIG user guide, CUDA visible devices).
    """
    places: list[int] = []
    words = [gpu.uuid for gpu in found] if visible is None else [part.strip() for part in visible.split(",")]
    for word in words:
        named = (place for place, gpu in enumerate(found) if word == str(gpu.index) or gpu.uuid.startswith(word))
        place = next(named, None) if word else None
        if place is None:
            break
        places.append(place)
    migs = [place for place in places if found[place].mig]
    places = migs[:1] or places
    return tuple(
        replace(found[place], index=index, links=tuple(found[place].links[other] for other in places))
        for index, place in enumerate(places)
    )


def link_quality(link: str) -> int:
    """Return how good a link is: 0 for SYS up to 4 for PIX, more for NV1 and up."""
    return len(CLASSES) - 1 + int(link[2:]) if link.startswith("NV") else CLASSES.index(link)


def best_connected(links: Sequence[Sequence[str]], count: int) -> tuple[int, ...]:
    """Return the `count` GPUs with the best worst link, then the best sum, then the lowest indices.

    `links[a][b]` is the class of the link between GPUs a and b.
    """

    def score(chosen: tuple[int, ...]) -> tuple[int, int]:
        ranks = [link_quality(links[a][b]) for a, b in combinations(chosen, 2)]
        return min(ranks, default=0), sum(ranks)

    return max(combinations(range(len(links)), count), key=score)


def describe_links(links: Sequence[Sequence[str]], chosen: Sequence[int]) -> str:
    """Return the worst and the best link among the chosen GPUs: `NV2` or `NV1 to NV2`."""
    found = sorted({links[a][b] for a, b in combinations(chosen, 2)}, key=link_quality)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" if found else "alone"
