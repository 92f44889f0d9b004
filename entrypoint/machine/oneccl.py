"""oneCCL's bindings for PyTorch: where they are installed, and the variables without which they find no transport."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

PACKAGE = "oneccl_bindings_for_pytorch"
# Where the wheel keeps libfabric's providers; other builds may keep them elsewhere below the package.
PROVIDERS = "opt/mpi/libfabric/lib/prov"
# Where they are if MPI and libfabric are packages of their own (impi-rt).
PROVIDERS_OF_PREFIX = "lib/libfabric/prov"


class OneCcl(Struct, frozen=True):
    """The folder below which MPI's libraries are, and the one with libfabric's providers; empty if there is none."""

    folder: str = ""
    providers: str = ""


def find_oneccl(prefix: Path) -> OneCcl:
    """Look for the bindings in the site-packages below `prefix`."""
    for folder in sorted(prefix.glob(f"lib/python3*/site-packages/{PACKAGE}")):
        usual = folder / PROVIDERS
        providers = usual if usual.is_dir() else next((path for path in folder.rglob("prov") if path.is_dir()), None)
        if providers is None and (prefix / PROVIDERS_OF_PREFIX).is_dir():
            providers = prefix / PROVIDERS_OF_PREFIX
        has_mpi = next(folder.rglob("libmpi.so*"), None) or not any(prefix.glob("lib/libmpi.so*"))
        return OneCcl(str(folder if has_mpi else prefix), str(providers or ""))
    return OneCcl()


def transport_variables(oneccl: OneCcl, environ: Mapping[str, str], *, by_hydra: bool) -> dict[str, tuple[str, str]]:
    """Return the variables by which oneCCL finds its transport, each with its reason.

    Without the first two, oneCCL 2021.14 could not initialize any transport library. Its default transport is the MPI
    of Intel and MPICH: it aborts without a launcher, and under Open MPI it hangs, as it takes PMIX_RANK for its own.
    """
    wanted: dict[str, tuple[str, str]] = {}
    if oneccl.folder:
        wanted["I_MPI_ROOT"] = (oneccl.folder, "oneCCL loads its MPI library from here")
    if oneccl.providers:
        wanted["FI_PROVIDER_PATH"] = (oneccl.providers, "oneCCL loads its network providers from here")
    if not by_hydra:
        wanted["CCL_ATL_TRANSPORT"] = ("ofi", "no mpirun of Intel's or MPICH's starts the ranks")
    return {name: value for name, value in wanted.items() if not environ.get(name)}
