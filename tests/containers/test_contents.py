"""What is in the images, and what is not."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import script
from tests.containers.conftest import IMAGES, REPOSITORY, STACKS, Docker, locked_version, run

pytestmark = pytest.mark.docker

NOT_IN_IT = ("uv", "make", "wget", "gdb", "nvcc", "nni_node")
TOOLS = ("mpirun", "prted", "numactl", "g++", "tini", "ssh", "git", "less", "ps", "curl", "pip", "ninja")
# Labels that are no package's version.
OTHER_LABELS = ("sbom", "with-oneccl", "torch-build", "end-of-life")


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
        if name.startswith("reference-training.") and not name.endswith(OTHER_LABELS)
    }
    asked = "import sys, importlib.metadata as m; print(*(m.version(n).split('+')[0] for n in sys.argv[1:]))"
    found = docker.run(image, "python", "-c", asked, *sorted(names)).out.split()
    assert found == [labels[f"reference-training.{name}"] for name in sorted(names)]
    created = "org.opencontainers.image.created"
    if created in labels:  # a checkout without git has no time
        assert datetime.fromisoformat(labels[created])
    build = labels["reference-training.torch-build"]
    assert build in (("pypi",) if image == "cuda" else ("cpu", "pypi"))
    assert ("reference-training.end-of-life" in labels) == (image == "cpu-intel")
    version = docker.run(image, "python", "-c", "import torch; print(torch.__version__, torch.version.cuda)").out
    assert ("+cpu" in version, "None" in version) == (build == "cpu", build == "cpu")
    assert json.loads(docker.run(image, "cat", "/opt/reference-training/image.json").out)["torch_build"] == build


def test_cuda_image_asks_for_gpus(docker: Docker) -> None:
    wanted = {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"}
    assert wanted <= set(docker.inspect("cuda")["Config"]["Env"]), "or enroot's hook gives none"
    for image in ("cpu", "cpu-intel"):
        assert not [name for name in docker.inspect(image)["Config"]["Env"] if name.startswith("NVIDIA_")]


@pytest.mark.parametrize("image", IMAGES)
def test_image_contains_promised_tools(docker: Docker, bound: Path, image: str) -> None:
    result = docker.run(image, "python", "-c", "import torch, torchvision; print(torch.__version__.split('+')[0])")
    assert (result.code, result.out) == (0, f"{locked_version(image, 'torch')}\n"), result.err
    tools = [*TOOLS, *(["mpiexec.hydra"] if image == "cpu-intel" else [])]
    found = docker.run(image, "bash", "-c", f"type -P {' '.join(tools)}").out.split()
    assert [Path(path).name for path in found] == tools
    bind = ("-v", f"{bound}:/workspace", "-e", "LAUNCH_DEVICE=cpu")
    doctor = json.loads(docker.run(image, "doctor", "--json", options=bind).out)
    seen = {check["what"]: check["seen"] for check in doctor}
    assert seen["tcmalloc"].startswith("/usr/lib/")
    warned = [check["what"] for check in doctor if check["state"] not in ("ok", "absent")]
    assert warned == (["end of life"] if image == "cpu-intel" else []), doctor
    labels = docker.inspect(image)["Config"]["Labels"]
    assert f", torch build {labels['reference-training.torch-build']}, oneCCL " in seen["image"]
    if image == "cpu-intel":
        assert seen["jemalloc"].startswith("/usr/lib/")
        assert seen["intel"] == "/opt/venv/lib/libiomp5.so"
        assert labels["reference-training.nni"] == seen["import nni"] == "3.0"
        oneccl = {"0": "left out (no ONECCL_INDEX)", "1": "installed"}[labels["reference-training.with-oneccl"]]
        assert seen["image"].endswith(f"oneCCL {oneccl}")


@pytest.mark.parametrize("image", IMAGES)
def test_image_contains_no_leftovers(docker: Docker, image: str) -> None:
    # Not by the entrypoint, which makes the user's cache folders.
    options = ("--user=0", "--entrypoint=find")
    everything = docker.run(image, "/", "-xdev", "-printf", "%m %y %s %p\\n", options=options).out
    lines = [line.split(" ", 3) for line in everything.splitlines()]
    paths = [(int(mode, 8), kind, int(size), path) for mode, kind, size, path in lines if not path.startswith("/proc/")]
    assert len(paths) > 10_000, "find has seen little"
    assert [path for mode, kind, _, path in paths if kind == "f" and mode & 0o6000] == [], "setuid"
    open_files = [path for mode, kind, _, path in paths if kind == "f" and mode & 0o002]
    assert open_files == [], "writable by all"
    leftovers = re.compile(
        r"^/(build|mnt/.|opt/tools|srv/.|root/\.cache|var/cache/apt/.|var/lib/apt/lists/.|var/log/.|tmp/.)"
    )
    assert [path for _, _, _, path in paths if leftovers.match(path)] == []
    assert [path for _, _, _, path in paths if path.endswith("dpkg.cfg.d/reference-training")] == []
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
        for file in (REPOSITORY / "containers" / STACKS[image]).glob("requirements.txt")
        for line in file.read_text().splitlines()
        if re.match(r"[a-z]", line)
    }
    wheels = {re.sub(r"[-_.]+", "-", purl.removeprefix("pkg:pypi/")) for purl in listed if purl.startswith("pkg:pypi/")}
    assert locked <= wheels


@pytest.mark.parametrize("image", IMAGES)
def test_image_bill_of_materials_has_ntia_minimum(docker: Docker, image: str) -> None:
    """Author, time, and of each part supplier, name, version, identifier and relationships (NTIA, July 2021)."""
    bill = json.loads(docker.run(image, "cat", "/opt/reference-training/sbom.json").out)
    assert bill["metadata"]["authors"]
    assert datetime.fromisoformat(bill["metadata"]["timestamp"])
    parts = bill["components"]
    lacking = [
        (part["name"], field)
        for part in parts
        for field in ("supplier", "name", "version", "purl", "hashes")
        if not part.get(field)
    ]
    assert lacking == []
    licensed = [part["name"] for part in parts if part.get("licenses")]
    wheels = [part["name"] for part in parts if part["purl"].startswith("pkg:pypi/")]
    assert len(set(licensed) & set(wheels)) > 0.9 * len(wheels)
    edges = {edge["ref"]: edge.get("dependsOn", []) for edge in bill["dependencies"]}
    refs = {part["bom-ref"] for part in parts}
    assert refs | {"image"} <= set(edges)
    reached, queue = set(), ["image"]
    while queue:
        ref = queue.pop()
        if ref not in reached:
            reached.add(ref)
            queue += edges.get(ref, [])
    assert {ref for ref in refs if ref.startswith("pkg:pypi/")} <= reached
    by_name = {part["name"]: part for part in parts}
    assert any("numpy@" in ref for ref in edges[by_name["torchvision"]["bom-ref"]])
    bundled = [file["name"] for file in by_name["torch"]["components"]]
    assert "torch/lib/libtorch_cpu.so" in bundled
    assert all(file["hashes"] for part in parts for file in part.get("components", ()))


FAKE_UV = "#!/bin/sh\necho 'error: Failed to fetch: Connection refused' >&2\nexit {code}\n"


@pytest.mark.parametrize(
    ("build", "reached", "code", "said"),
    [
        ("cpu", True, 0, "cpu"),
        ("cpu", False, 3, "Reach it, or set TORCH_BUILD=pypi"),
        ("pypi", False, 0, "pypi"),
        ("auto", True, 0, "cpu"),  # of `make .venv/installed`
        ("auto", False, 0, "pypi"),
        ("gpu", True, 2, "TORCH_BUILD=gpu: no such build. Use cpu or pypi."),
    ],
)
def test_torch_build_is_chosen_or_fails_loudly(tmp_path: Path, build: str, reached: bool, code: int, said: str) -> None:
    uv = script(tmp_path, "uv", FAKE_UV.format(code=0 if reached else 2))
    uv.chmod(0o755)
    words = f"set -e; . containers/torch.sh; uv=({uv}); choose_torch containers/cpu-intel {build} python; "
    result = run("bash", "-c", words + "echo $torch_build >&2")
    assert result.code == code
    assert said in result.err.splitlines()[-1]
    assert ("Connection refused" in result.err) == (code == 3), "the cause too"


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("steps/wheels.sh", "cpu-intel"), {"TORCH_BUILD": "auto"}, "wheels.sh: TORCH_BUILD=auto: no such build"),
        (("build.sh", "docker", "cpu"), {"TORCH_BUILD": "auto"}, "build.sh: TORCH_BUILD=auto: no such build"),
        (("build.sh", "sif", "gpu"), {}, "build.sh: gpu: no such image. Use one of: cpu cuda cpu-intel."),
    ],
)
def test_wrong_build_is_one_line(words: tuple[str, ...], env: dict[str, str], said: str) -> None:
    result = run("bash", f"containers/{words[0]}", *words[1:], env=env)
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert result.err.startswith(said)


@pytest.mark.parametrize("image", ["cpu", "cpu-intel"])
def test_index_out_of_reach_is_said_before_anything_is_built(tmp_path: Path, image: str) -> None:
    for name in ("curl", "docker"):
        script(tmp_path, name, "#!/bin/sh\nexit 7\n").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = run("bash", "containers/build.sh", "docker", image, env={"PATH": path, "TORCH_BUILD": ""})
    assert (result.code, len(result.err.splitlines())) == (3, 1)
    assert "cannot be reached from here. Reach it, or set TORCH_BUILD=pypi" in result.err
    asked = run("bash", "containers/build.sh", "docker", image, env={"PATH": path, "TORCH_BUILD": "cpu"})
    assert (asked.code, asked.err) == (7, ""), "docker is asked where the build is named"


@pytest.mark.parametrize("image", IMAGES)
def test_labels_have_the_locks_versions(image: str) -> None:
    printed = run("bash", "containers/steps/labels.sh", image, "containers/Dockerfile", env={"TORCH_BUILD": "cpu"})
    labels = dict(line.split(" ", 1) for line in printed.out.splitlines())
    assert labels["reference-training.torch-build"] == ("pypi" if image == "cuda" else "cpu")
    versions = {name.partition(".")[2]: value for name, value in labels.items() if name.startswith("reference-")}
    packages = [name for name in versions if name not in OTHER_LABELS]
    assert {"torch", "torchvision"} <= set(packages)
    assert {name: versions[name] for name in packages} == {name: locked_version(image, name) for name in packages}


def test_cpu_and_cuda_share_the_layers_of_equal_wheels(docker: Docker) -> None:
    if docker.inspect("cpu")["Config"]["Labels"]["reference-training.torch-build"] != "pypi":
        pytest.skip("needs an image cpu of TORCH_BUILD=pypi: PyTorch's CPU build has other wheels")
    layers = [docker.inspect(image)["RootFS"]["Layers"] for image in ("cpu", "cuda")]
    assert len(layers[0]) == len(layers[1])
    different = [number for number, pair in enumerate(zip(*layers, strict=True)) if pair[0] != pair[1]]
    assert different == [len(layers[0]) - 2, len(layers[0]) - 1] or different == [len(layers[0]) - 2], different


@pytest.mark.parametrize("image", IMAGES)
def test_image_is_debian_13_with_whole_libraries(docker: Docker, image: str) -> None:
    """Leaving ROCm out must break nothing: each library of Debian's finds what it links to."""
    release = docker.run(image, "sh", "-c", ". /etc/os-release && echo $ID $VERSION_ID").out
    assert release == "debian 13\n"
    assert docker.run(image, "mpirun", "--version").out.startswith("mpirun (Open MPI) 5.")
    find = "find /usr/bin /usr/sbin /usr/lib -xdev -type f '(' -perm -100 -o -name '*.so*' ')'"
    missing = docker.run(image, "sh", "-c", f"{find} -exec ldd {{}} + 2>/dev/null | grep 'not found' | sort -u").out
    # hydra's package has MPICH's own tests too, whose library dpkg.excludes leaves out.
    assert missing.split() == (["libmpich.so.12", "=>", "not", "found"] if image == "cpu-intel" else [])
    rocm = docker.run(image, "sh", "-c", "find /usr/lib -name 'libamd*hip*' -o -name 'libLLVM*' -o -name 'libhsa*'")
    assert (rocm.code, rocm.out) == (0, "")


def test_dockerfile_needs_no_argument_and_mounts_few_files() -> None:
    text = (REPOSITORY / "containers/Dockerfile").read_text()
    assert not re.search(r"type=bind,(source|target)=", text), "a mount of the context changes with each file in it"
    required = [
        name for name in re.findall(r"^ARG (\w+)$", text, re.MULTILINE) if name not in ("ONECCL_INDEX", "CREATED")
    ]
    defaults = re.findall(r"^ARG (\w+)=", text.partition("\nFROM ")[0], re.MULTILINE)
    assert set(required) <= set(defaults)
    stages = re.findall(r"^FROM scratch AS (\S+)\n((?:COPY .*\n)+)", text, re.MULTILINE)
    assert [stage for stage, _ in stages if f"from={stage}," not in text] == []
    for stage, copies in stages:
        if stage == "project-files":
            continue
        sources = [word for line in copies.splitlines() for word in line.split()[1:-1]]
        assert [word for word in sources if not list(REPOSITORY.glob(word))] == []


def test_image_selftest_passes(docker: Docker) -> None:
    options = ("-e", "FUZZ_EXAMPLES=50", "--read-only", "--tmpfs=/tmp")
    result = docker.run("cpu-intel", "selftest", options=options, limit_s=900)  # 2 minutes, but next to other suites
    assert result.code == 0, result.out[-3000:]
    assert " passed" in result.out.splitlines()[-1]
