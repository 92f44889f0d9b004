"""What users add to an image: by a Dockerfile, by a definition of Apptainer, and next to an image that stays as it is.

docs/extend-an-image.md shows the same.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Result, script
from tests.containers.conftest import IMAGES, REPOSITORY, SIFS, SITE, Apptainer, Docker, inside, locked_version, run

PAGE = (REPOSITORY / "docs/extend-an-image.md").read_text()
# What says that a package index or Debian's mirror cannot be reached from a container.
OFFLINE = re.compile(
    r"NameResolutionError|Temporary failure|Network is unreachable|Failed to establish a new connection"
)
ASK = "import einops, torch; print(einops.__file__, torch.__version__.split('+')[0])"
# A version that no image has.
OTHER_TORCH = "torch<2.8"


def blocks(start: str) -> list[str]:
    """Return the page's blocks of code that start with this word."""
    found = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE, re.MULTILINE)]
    return [block.strip("\n") for block in found if block.strip().startswith(start)]


def need_index(result: Result) -> None:
    """Skip the test where nothing can be installed from here."""
    if result.code and OFFLINE.search(result.out + result.err):
        pytest.skip("needs a package index and Debian's mirror")


@pytest.fixture
def build(docker: Docker, tmp_path: Path) -> Iterator[list[str]]:
    """The tags of images that a test builds; they are removed."""
    del docker, tmp_path
    tags: list[str] = []
    yield tags
    for tag in tags:
        run("docker", "rmi", "--force", tag)


def derive(tags: list[str], folder: Path, text: str) -> Result:
    """Build a user's Dockerfile."""
    (folder / "Dockerfile").write_text(text)
    tags.append(f"extended{os.getpid()}-{len(tags)}")
    result = run("docker", "build", "--progress=plain", f"--tag={tags[-1]}", folder, env={"DOCKER_BUILDKIT": "1"})
    need_index(result)
    return result


def test_page_shows_one_plain_line_and_three_ways() -> None:
    assert blocks("FROM")[0] == "FROM reference-training:cuda\nRUN pip install einops"
    assert len(blocks("Bootstrap: localimage")) == 1
    assert len(blocks("apptainer exec")) == 1


@pytest.mark.docker
@pytest.mark.parametrize("image", IMAGES)
def test_one_plain_line_adds_a_package_for_any_user(
    docker: Docker, build: list[str], tmp_path: Path, image: str
) -> None:
    docker.tag(image)
    built = derive(build, tmp_path, blocks("FROM")[0].replace(":cuda", f":{image}"))
    assert built.code == 0, built.err
    torch = docker.run(image, "python", "-c", "import torch; print(torch.__version__.split('+')[0])").out
    for user in ("1000:1000", "54321:54321", "0:0"):
        asked = run(
            "docker", "run", "--rm", "--read-only", "--network=none", f"--user={user}", build[-1], "python", "-c", ASK
        )
        assert asked.out == f"{SITE}/einops/__init__.py {torch}", asked.err
    config = run("docker", "image", "inspect", "--format={{.Config.User}}", build[-1]).out
    assert config == "1000:1000\n"


@pytest.mark.docker
@pytest.mark.parametrize("image", IMAGES)
def test_added_packages_cannot_replace_torch_unasked(docker: Docker, image: str) -> None:
    refused = docker.run(image, "pip", "install", OTHER_TORCH)
    need_index(refused)
    assert refused.code == 1
    assert "The user requested (constraint) torch==" in refused.err + refused.out
    kept = docker.run(image, "cat", "/opt/reference-training/constraints.txt").out
    names = {line.partition("==")[0] for line in kept.splitlines() if not line.startswith("#")}
    assert {"torch", "torchvision"} <= names
    assert not {"nvidia-ml-py", "numpy", "torch-pruning"} & names


@pytest.mark.docker
def test_uv_keeps_torch_too(docker: Docker) -> None:
    uv = shutil.which("uv") or str(REPOSITORY / ".venv/tools/bin/uv")
    if not Path(uv).exists():
        pytest.skip("needs uv: make .venv/installed")
    options = (
        "-v",
        f"{Path(uv).resolve()}:/usr/local/bin/uv:ro",
        "-e",
        "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
    )
    refused = docker.run("cuda", "uv", "pip", "install", OTHER_TORCH, options=options)
    need_index(refused)
    if "Failed to fetch" in refused.err:
        pytest.skip("needs a package index")
    assert refused.code == 1
    assert f"torch=={locked_version('cuda', 'torch')}" in refused.err
    added = docker.run("cuda", "bash", "-c", f'uv pip install -q einops && python -c "{ASK}"', options=options)
    assert added.out == f"{SITE}/einops/__init__.py {locked_version('cuda', 'torch')}\n", added.err


@pytest.mark.docker
def test_debian_packages_are_added_whole(docker: Docker, build: list[str], tmp_path: Path) -> None:
    docker.tag("cuda")
    text = blocks("FROM")[1].replace("-y --no-install-recommends ffmpeg", "-y --reinstall libjpeg62-turbo-dev")
    assert "--reinstall" in text
    built = derive(build, tmp_path, f"{text}\nRUN test -f /usr/lib/$(uname -m)-linux-gnu/libjpeg.a")
    assert built.code == 0, "dpkg.excludes leaves that file out of the image, and of nothing else: " + built.err


@pytest.mark.docker
def test_licenses_that_a_base_lacks_come_from_its_packages(docker: Docker, build: list[str], tmp_path: Path) -> None:
    docker.tag("cpu")
    shutil.copytree(REPOSITORY / "containers", tmp_path / "containers")
    files = " ".join(f"/usr/share/doc/{name}/copyright" for name in ("tar", "coreutils", "libc6"))
    made = "bash /mnt/steps/system.sh /dev/null"
    text = f"FROM reference-training:cpu\nUSER 0\nCOPY containers /mnt\nRUN rm {files} && {made} && wc -l {files}\n"
    built = derive(build, tmp_path, text)
    assert built.code == 0, built.err


EXTENSION = """
import torch
from torch.utils.cpp_extension import load_inline

source = "torch::Tensor twice(torch::Tensor x) { return x + x; }"
mine = load_inline("mine", cpp_sources=[source], functions=["twice"])
print(mine.twice(torch.ones(3)).sum().item())
"""


@pytest.mark.docker
@pytest.mark.parametrize("image", IMAGES)
def test_users_extension_builds_as_a_user_without_a_name(docker: Docker, bound: Path, image: str) -> None:
    script(bound, "x.py", EXTENSION)
    options = ("--read-only", "--network=none", "--user=54321", "--tmpfs=/tmp:exec", "-v", f"{bound}:/workspace")
    result = docker.run(image, "python", "x.py", options=(*options, "-e", "TORCH_EXTENSIONS_DIR=/tmp/extensions"))
    assert (result.code, result.out) == (0, "6.0\n"), result.err[-2000:]


def overlay_lines(prefix: str) -> list[str]:
    """Return the page's lines for packages next to an image, with another command in place of `apptainer exec`."""
    lines = blocks("apptainer exec")[0].splitlines()
    return [re.sub(r"apptainer exec (--nv )?sif/cuda\.sif", prefix, line) for line in lines]


PROGRAM = "import einops, os, sys, torch; print(sys.prefix, einops.__file__, torch.__file__, os.environ['RANK'])"


def check_overlay(result: Result, folder: str) -> None:
    need_index(result)
    torch = f"{SITE}/torch/__init__.py"
    expected = f"{folder}/extra {folder}/extra/lib/python3.13/site-packages/einops/__init__.py {torch} 0"
    assert result.out.splitlines()[-1] == expected, result.err


@pytest.mark.docker
@pytest.mark.parametrize("image", IMAGES)
def test_environment_next_to_a_read_only_image(docker: Docker, bound: Path, image: str) -> None:
    script(bound, "x.py", PROGRAM)
    tag = docker.tag(image)
    options = (
        f"--rm --read-only --tmpfs=/tmp --user=54321:54321 -e LAUNCH_QUIET=1 -e LAUNCH_DEVICE=cpu -v {bound}:/workspace"
    )
    lines = overlay_lines(f"docker run {options} {tag}")
    lines.insert(
        1, f"docker run --rm --user=0 -v {bound}:/workspace {tag} chmod -R a+rwX extra"
    )  # the shell is not 54321
    check_overlay(run("bash", "-ec", "\n".join([f"cd {bound}", *lines])), "/workspace")


@pytest.mark.apptainer
@pytest.mark.parametrize("image", SIFS)
def test_environment_next_to_a_sif(apptainer: Apptainer, place: Path, image: str) -> None:
    script(place, "x.py", PROGRAM)
    there = inside(apptainer, place)
    lines = overlay_lines(f"{' '.join(apptainer.command)} --quiet exec --pwd {there} {apptainer.sif(image)}")
    env = {"LAUNCH_QUIET": "1", "LAUNCH_DEVICE": "cpu"}
    check_overlay(run("bash", "-ec", "\n".join([f"cd {place}", *lines]), env=env), there)


@pytest.mark.apptainer
@pytest.mark.slow
def test_sif_from_a_local_image(apptainer: Apptainer, place: Path) -> None:
    there = inside(apptainer, place)
    definition = place / "mine.def"
    definition.write_text(blocks("Bootstrap: localimage")[0].replace("sif/cuda.sif", apptainer.sif("cuda")) + "\n")
    built = run(*apptainer.command, "build", "--sandbox", f"{there}/mine", f"{there}/mine.def", limit_s=900)
    try:
        need_index(built)
        assert built.code == 0, built.err
        asked = run(*apptainer.command, "--quiet", "exec", f"{there}/mine", "python", "-c", ASK)
        assert asked.out == f"{SITE}/einops/__init__.py {locked_version('cuda', 'torch')}\n", asked.err
    finally:
        run(*apptainer.command, "--quiet", "exec", apptainer.sif("cuda"), "rm", "-rf", f"{there}/mine")
