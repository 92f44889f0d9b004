"""oneCCL's bindings for PyTorch: where they are installed, and the variables without which they find no transport."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

PACKAGE = "oneccl_bindings_for_pytorch"
# Where the wheel keeps libfabric's providers; other builds may keep them elsewhere below the package.
PROVIDERS = "opt/mpi/libfabric/lib/prov"


class OneCcl(Struct, frozen=True):
    """The folder of the bindings and the one with libfabric's providers; empty if there is none."""

    folder: str = ""
    providers: str = ""


def find_oneccl(prefix: Path) -> OneCcl:
    """Look for the bindings in the site-packages below `prefix`."""
    for folder in sorted(prefix.glob(f"lib/python3*/site-packages/{PACKAGE}")):
        usual = folder / PROVIDERS
        providers = usual if usual.is_dir() else next((path for path in folder.rglob("prov") if path.is_dir()), None)
        return OneCcl(str(folder), str(providers or ""))
    return OneCcl()


def transport_variables(
    oneccl: OneCcl, environ: Mapping[str, str], *, started_by_mpi: bool
) -> dict[str, tuple[str, str]]:
    """Return the variables by which oneCCL finds its transport, each with its reason.

    Without the first two, oneCCL 2021.16 could not initialize any transport library. Its default transport is MPI,
    and it aborts where no MPI launcher started the rank.
    """
    wanted: dict[str, tuple[str, str]] = {}
    if oneccl.folder:
        wanted["I_MPI_ROOT"] = (oneccl.folder, "oneCCL loads its MPI library from here")
    if oneccl.providers:
        wanted["FI_PROVIDER_PATH"] = (oneccl.providers, "oneCCL loads its network providers from here")
    if not started_by_mpi:
        wanted["CCL_ATL_TRANSPORT"] = ("ofi", "no MPI launcher starts the ranks")
    return {name: value for name, value in wanted.items() if not environ.get(name)}
