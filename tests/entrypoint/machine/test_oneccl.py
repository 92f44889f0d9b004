"""Where oneCCL's bindings are, and what they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.machine.backends import OneCcl, find_oneccl, transport_variables

SITE = "lib/python3.11/site-packages/oneccl_bindings_for_pytorch"


@pytest.mark.parametrize("providers", ["opt/mpi/libfabric/lib/prov", "lib/prov", ""])
def test_find_oneccl_finds_providers_where_they_are(tmp_path: Path, providers: str) -> None:
    folder = tmp_path / SITE
    (folder / providers).mkdir(parents=True)
    assert find_oneccl(tmp_path) == OneCcl(str(folder), str(folder / providers) if providers else "")


def test_find_oneccl_takes_libraries_of_their_own_packages(tmp_path: Path) -> None:
    (tmp_path / SITE).mkdir(parents=True)
    (tmp_path / "lib/libfabric/prov").mkdir(parents=True)
    (tmp_path / "lib/libmpi.so.12").touch()
    assert find_oneccl(tmp_path) == OneCcl(str(tmp_path), str(tmp_path / "lib/libfabric/prov"))


def test_find_oneccl_without_the_package_is_empty(tmp_path: Path) -> None:
    assert find_oneccl(tmp_path) == OneCcl()


INSTALLED = OneCcl("/p", "/p/prov")


@pytest.mark.parametrize(
    ("oneccl", "environ", "by_hydra", "variables"),
    [
        (INSTALLED, {}, False, {"I_MPI_ROOT": "/p", "FI_PROVIDER_PATH": "/p/prov", "CCL_ATL_TRANSPORT": "ofi"}),
        (INSTALLED, {}, True, {"I_MPI_ROOT": "/p", "FI_PROVIDER_PATH": "/p/prov"}),
        (INSTALLED, {"I_MPI_ROOT": "/mine", "CCL_ATL_TRANSPORT": "mpi"}, False, {"FI_PROVIDER_PATH": "/p/prov"}),
        (OneCcl("/p", ""), {}, True, {"I_MPI_ROOT": "/p"}),
        (OneCcl(), {}, False, {"CCL_ATL_TRANSPORT": "ofi"}),
    ],
)
def test_transport_variables_are_set_where_missing(
    oneccl: OneCcl, environ: dict[str, str], by_hydra: bool, variables: dict[str, str]
) -> None:
    found = transport_variables(oneccl, environ, by_hydra=by_hydra)
    assert {name: value for name, (value, _) in found.items()} == variables
