"""Detect the container engine, the file systems of folders, /dev/shm, and the limit of locked memory."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from entrypoint.machine.procfs import read_lines

# Metadata of this project's images: name, revision, oneccl.
IMAGE_INFO = "opt/reference-training/image.json"
# The marker file of each engine in the root of its containers.
ENGINE_MARKERS = {".singularity.d": "Apptainer", "run/.containerenv": "Podman", ".dockerenv": "Docker"}
# The root file systems of containers whose changes go with the container.
OVERLAYS = ("overlay", "fuse.fuse-overlayfs", "fuse-overlayfs", "aufs")


class ContainerInfo(Struct, frozen=True):
    """The container that this process runs in.

    `engine` is Docker, Podman or Apptainer, and empty outside a container.
    `memlock_bytes` is None if unlimited. `rdma` lists the node's RDMA adapters, which lock memory. `image` is the
    metadata of this project's image.
    """

    engine: str = ""
    shm_bytes: int = 0
    memlock_bytes: int | None = None
    rdma: tuple[str, ...] = ()
    image: Mapping[str, str] = field(default_factory=dict)


def detect_container(root: Path) -> ContainerInfo:
    """Detect the container under `root`; hidden values keep their defaults."""
    container = next((engine for marker, engine in ENGINE_MARKERS.items() if (root / marker).exists()), "")
    adapters = tuple(sorted(path.name for path in (root / "sys/class/infiniband").glob("*")))
    return ContainerInfo(
        engine=container,
        shm_bytes=shm_bytes(root),
        memlock_bytes=memlock_bytes(),
        rdma=adapters,
        image=read_image(root),
    )


def read_image(root: Path) -> Mapping[str, str]:
    """Return the metadata of this project's image, empty in another environment."""
    lines = read_lines(root / IMAGE_INFO)
    return {str(name): str(value) for name, value in json.loads("\n".join(lines)).items()} if lines else {}


def mount_types(root: Path) -> dict[str, str]:
    """Return the type of the file system at each mount point, the last one where several are."""
    fields = [line.split() for line in read_lines(root / "proc/self/mounts")]
    return {
        re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), one[1]): one[2] for one in fields if len(one) >= 3
    }


# Types of file systems that several nodes share (proc(5), /proc/self/mounts).
NETWORK_TYPES = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "cifs",
        "smb3",
        "afs",
        "glusterfs",
        "9p",
        "pvfs2",
        "orangefs",
        "panfs",
        "wekafs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.sshfs",
        "fuse.juicefs",
    }
)


def mount_point(mounts: Mapping[str, str], folder: Path) -> str:
    """Return the mount point of a folder, which may be on its way to exist; empty if /proc hides it."""
    path = Path(os.path.realpath(folder))
    return next((str(place) for place in (path, *path.parents) if str(place) in mounts), "")


def is_on_network(root: Path, folder: Path) -> bool:
    """Return whether a folder is on a file system that other nodes share."""
    mounts = mount_types(root)
    return mounts.get(mount_point(mounts, folder), "") in NETWORK_TYPES


def volatile_place(root: Path, folder: Path) -> str:
    """Return where a folder's files are lost with the container: its own layer, or a tmpfs; empty elsewhere.

    `folder` may be on its way to exist: its mount point counts. A root of another kind than an overlay keeps its files.
    """
    mounts = mount_types(root)
    in_container = mounts.get("/", "") in OVERLAYS or any((root / marker).exists() for marker in ENGINE_MARKERS)
    point = mount_point(mounts, folder)
    kind = mounts.get(point, "")
    if not in_container:
        return ""
    if point == "/" and kind in OVERLAYS:
        return "the container's own layer"
    return "a tmpfs of the container" if kind in ("tmpfs", "ramfs") else ""


def shm_bytes(root: Path) -> int:
    """Return the size of /dev/shm in bytes, 0 if there is none."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return stat.f_blocks * stat.f_frsize


def memlock_bytes() -> int | None:
    """Return how many bytes may be locked in memory (RDMA and pinned buffers count), None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
