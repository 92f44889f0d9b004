"""What is in the images, and what is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.containers.conftest import IMAGES, REPOSITORY, Docker, run

pytestmark = pytest.mark.docker

TORCH = {"cpu-intel": "2.8.0", "cuda": "2.13.0"}
NOT_IN_IT = (
    *("pip", "uv", "make", "curl", "wget", "git", "gdb"),
    *("nvcc", "nni_node"),
)


@pytest.mark.parametrize("image", IMAGES)
def test_image_labels_name_its_parts(docker: Docker, image: str) -> None:
    config = docker.inspect(image)["Config"]
    labels = config["Labels"]
    wanted = ("title", "description", "version", "source", "revision", "licenses")
    assert all(labels[f"org.opencontainers.image.{name}"] for name in wanted)
    assert config["User"] == "1000:1000"
    assert not [name for name in config["Env"] if re.search("(?i)token|secret|password|proxy|index", name)]
    names = {
        name.removeprefix("reference-training.")
        for name in labels
        if name.startswith("reference-training.") and not name.endswith(("sbom", "with-oneccl"))
    }
    asked = "import sys, importlib.metadata as m; print(*(m.version(n).split('+')[0] for n in sys.argv[1:]))"
    found = docker.run(image, "python", "-c", asked, *sorted(names)).out.split()
    assert found == [labels[f"reference-training.{name}"] for name in sorted(names)]


@pytest.mark.parametrize("image", IMAGES)
def test_image_contains_promised_tools(docker: Docker, image: str) -> None:
    result = docker.run(image, "python", "-c", "import torch, torchvision, nni; print(torch.__version__.split('+')[0])")
    assert (result.code, result.out) == (0, f"{TORCH[image]}\n"), result.err
    tools = ["mpirun", "orted", "numactl", "g++", "tini", "ssh", *(["mpiexec.hydra"] if image == "cpu-intel" else [])]
    found = docker.run(image, "bash", "-c", f"type -P {' '.join(tools)}").out.split()
    assert [Path(path).name for path in found] == tools
    doctor = json.loads(docker.run(image, "doctor", "--json").out)
    seen = {check["what"]: check["seen"] for check in doctor}
    assert seen["tcmalloc"].startswith("/usr/lib/")
    assert all(check["state"] in ("ok", "absent") for check in doctor), doctor
    if image == "cpu-intel":
        assert seen["jemalloc"].startswith("/usr/lib/")
        assert seen["intel"] == "/opt/venv/lib/libiomp5.so"
        assert seen["image"].endswith("oneCCL left out (WITH_ONECCL=0)")
        assert docker.inspect(image)["Config"]["Labels"]["reference-training.with-oneccl"] == "0"


@pytest.mark.parametrize("image", IMAGES)
def test_image_contains_no_leftovers(docker: Docker, image: str) -> None:
    everything = docker.run(image, "find", "/", "-xdev", "-printf", "%m %y %s %p\\n", options=("--user=0",)).out
    lines = [line.split(" ", 3) for line in everything.splitlines()]
    paths = [(int(mode, 8), kind, int(size), path) for mode, kind, size, path in lines if not path.startswith("/proc/")]
    assert [path for mode, kind, _, path in paths if kind == "f" and mode & 0o6000] == [], "setuid"
    open_files = [path for mode, kind, _, path in paths if kind == "f" and mode & 0o002]
    assert open_files == [], "writable by all"
    leftovers = re.compile(
        r"^/(build|mnt/.|opt/tools|srv/.|root/\.cache|var/cache/apt/.|var/lib/apt/lists/.|var/log/.|tmp/.)"
    )
    assert [path for _, _, _, path in paths if leftovers.match(path)] == []
    assert [
        path for _, kind, _, path in paths if kind != "d" and Path(path).name in NOT_IN_IT and "/share/" not in path
    ] == []
    tests = [path for _, _, _, path in paths if re.search(r"site-packages/.*/tests/", path)]
    assert tests == []
    # Another MPI's or CUDA's second copy would be a mistake: the wheels carry CUDA, Debian has Open MPI once.
    assert len([path for _, _, _, path in paths if re.search(r"/libmpi\.so\.\d+$", path)]) == 1
    assert not [path for _, _, _, path in paths if re.match(r"/usr/(local/)?cuda", path)]


@pytest.mark.parametrize("image", IMAGES)
def test_image_bill_of_materials_is_complete(docker: Docker, image: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = docker.run(image, "cat", "/opt/reference-training/sbom.json").out
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    listed = {unquote(part["purl"].split("?")[0]) for part in json.loads(text)["components"]}
    packages = docker.run(image, "dpkg-query", "-W", "-f", "${Package} ").out.split()
    assert {purl.split("/")[2].split("@")[0] for purl in listed if purl.startswith("pkg:deb/")} == set(packages)
    locked = {
        re.sub(r"[-_.]+", "-", line.split(" ")[0].replace("==", "@")).lower()
        for file in (REPOSITORY / "containers" / image).glob("requirements.txt")
        for line in file.read_text().splitlines()
        if re.match(r"[a-z]", line)
    }
    wheels = {re.sub(r"[-_.]+", "-", purl.removeprefix("pkg:pypi/")) for purl in listed if purl.startswith("pkg:pypi/")}
    assert locked <= wheels


def test_oneccl_without_index_fails_before_download() -> None:
    result = run("bash", "containers/steps/wheels.sh", "cpu-intel", env={"WITH_ONECCL": "1", "ONECCL_INDEX": ""})
    assert result.code == 2
    assert result.err.startswith("wheels.sh: WITH_ONECCL=1 needs ONECCL_INDEX")


def test_image_selftest_passes(docker: Docker) -> None:
    options = ("-e", "FUZZ_EXAMPLES=50", "--read-only", "--tmpfs=/tmp")
    result = docker.run("cpu-intel", "selftest", options=options, limit_s=900)  # 2 minutes, but next to other suites
    assert result.code == 0, result.out[-3000:]
    assert " passed" in result.out.splitlines()[-1]
