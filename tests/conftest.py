"""What the tests share: a clean environment, real launches, small real images, built machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer
from typing import Any

# Several workers of pytest share the cores, and OpenMP's threads that wait for each other use them up.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

from entrypoint.core.errors import ExitCode, UserError
from tests.machines import smp
from tests.net import free_port
from tools.cgroups import memory_limit, quota
from tools.cifar10_images import unpacked_images

# A shared machine can stall for longer than any deadline that would mean something.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

PYTHON = sys.executable
# Longer where several suites share the machine.
LAUNCH_LIMIT_S = int(os.environ.get("TEST_LIMIT_S", "120"))
# How many cases each property and the environment fuzz tries: `make fuzz` sets more.
FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "200"))
CORES = len(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(CORES < 2, reason=f"needs 2 cores, this process may use {CORES}")

# Whatever a launcher, a batch system or a user has set in the shell that runs the tests stays out of them.
FOREIGN = (
    "LAUNCH_", "TRAIN_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "SLURM_", "TORCHELASTIC_",
    "OMP_", "KMP_", "GLOO_", "MASTER_", "PYTHON", "ENTRYPOINT_", "ACCELERATE_",
)  # fmt: skip
FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")


def clean_environment() -> dict[str, str]:
    """Return this process's environment without anything that a plan reads; suites that run next to it are ignored."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
    }
    return {**clean, "LAUNCH_RESERVE_CPUS": "0"}


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    def succeeded(self) -> Result:
        """Return this of a command that must have ended with code 0."""
        assert self.code == 0, self.err + self.out
        return self

    @property
    def error_lines(self) -> list[str]:
        """The lines that the entrypoint itself calls errors."""
        return [line for line in self.err.splitlines() if line.startswith("entrypoint: error: ")]


# Commands that run as forks of a process with torch, unless a test says by which command they start.
FORKED = frozenset({"train", "plan", "evaluate", "predict", "export", "quantize", "report"})
# What only the start of an interpreter or of a library reads, or the import of one (CXX: torch._inductor.config).
READ_AT_START = ("PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "GLIBC_", "CXX", "LAUNCH_OPENMP")
START = (PYTHON, "-m", "entrypoint")


class Forks:
    """Runs commands of the entrypoint by `fork_server.py`, which starts with the first of them."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.lock = Lock()

    def __call__(self, words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Result:
        with self.lock, tempfile.TemporaryDirectory() as scratch:
            out, err = Path(scratch, "out"), Path(scratch, "err")
            for file in (out, err):
                file.touch()
            request = {"words": words, "folder": str(folder), "environ": environ, "out": str(out), "err": str(err)}
            code = self.run(json.dumps(request))
            return Result(code, out.read_text(), err.read_text())

    def run(self, request: str) -> int:
        """Pass a command on, and return its exit code."""
        if self.server is None:
            words = (PYTHON, "-I", Path(__file__).with_name("fork_server.py"))
            environ = {**clean_environment(), "OMP_WAIT_POLICY": "passive"}
            self.server = subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.server.stdin
        assert self.server.stdout
        self.server.stdin.write(f"{request}\n")
        self.server.stdin.flush()
        limit = Timer(LAUNCH_LIMIT_S, os.kill, (int(self.server.stdout.readline()), signal.SIGKILL))
        limit.start()
        try:
            return int(self.server.stdout.readline())
        finally:
            limit.cancel()


FORKS = Forks()


class Entrypoint:
    """Runs the real entrypoint in a folder of its own, as a user would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()

    def __call__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        command: tuple[str, ...] = (),
    ) -> Result:
        """Run a command to its end; by `command`, or as a fork where it is one of those."""
        environ = {**clean_environment(), "HOME": str(self.home), **(env or {})}
        words = [*map(str, arguments)]
        if not command and {*words[:1]} <= FORKED and not any(name.startswith(READ_AT_START) for name in environ):
            return FORKS(words, cwd or self.folder, environ)
        done = subprocess.run(
            [*(command or START), *words],
            cwd=cwd or self.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=LAUNCH_LIMIT_S,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def succeed(self, *arguments: str | Path, **options: Any) -> Result:
        """Run a command, which must end with code 0."""
        return self(*arguments, **options).succeeded()

    def error_line(self, *arguments: str | Path, code: int = ExitCode.USAGE, **options: Any) -> str:
        """Run a command that must end with this code and one line of error, all that a quiet run prints; return it."""
        result = self(*arguments, **options)
        assert result.code == code, result.err + result.out
        (line,) = result.error_lines
        assert "Traceback" not in result.err
        is_quiet = "--quiet" in arguments or "LAUNCH_QUIET" in (options.get("env") or {})
        assert not is_quiet or result.err == f"{line}\n"
        return line

    def run_script(self, text: str, *words: str | Path, **options: Any) -> Result:
        """Run a user's script with this text, as x.py; the words stand in front of it."""
        script(self.folder, "x.py", text)
        return self("run", *words, "x.py", **options)

    def plan(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Any:
        """Return the plan as parsed JSON."""
        return json.loads(self.succeed("plan", "--json", *arguments, env=env).out)

    def train(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Any:
        """Train, which must succeed, and return the summary."""
        self.succeed("train", *arguments, env={"TRAIN_TENSORBOARD": "0", **(env or {})})
        return self.summary()

    def cut(self, name: str = "run") -> None:
        """Remove all checkpoints of a run but its first, as if it had been killed after that."""
        for path in sorted(self.folder.glob(f"runs/{name}/checkpoint/step-*"))[1:]:
            shutil.rmtree(path)

    def summary(self, name: str = "latest") -> Any:
        """Return a run's summary.json."""
        return json.loads((self.folder / "runs" / name / "summary.json").read_text())


def refusal(
    call: Callable[..., object],
    *arguments: Any,
    match: str | None = None,
    code: int = ExitCode.USAGE,
    **named: Any,
) -> str:
    """Return the message with which a call refuses: one printable line, with this exit code."""
    with pytest.raises(UserError, match=match) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert message.isprintable(), ascii(message)
    assert caught.value.code == code, message
    return message


def launcher(*names: str, said: str) -> str:
    """Return the first of these commands whose version says so; skips the test where there is none."""
    for name in names:
        path = shutil.which(name)
        if path and said in subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout:
            return path
    pytest.skip(f"needs {said}: none of {', '.join(names)} is here")


def intel_openmp() -> Path:
    """Return Intel's OpenMP runtime of this environment; skips the test where it cannot be preloaded."""
    library = Path(sys.prefix, "lib/libiomp5.so")
    if not library.exists() or set(" :") & set(str(library)):
        pytest.skip("needs intel-openmp in this environment, whose path has no blank and no colon")
    return library


def script(folder: Path, name: str, text: str) -> Path:
    """Write a user's script."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases as slow that `slow_except` does not name, before pytest selects by markers."""
    for item in items:
        for marker in item.iter_markers("slow_except"):
            if marker.args[0] not in item.name.partition("[")[2]:
                item.add_marker(pytest.mark.slow)


def pytest_configure() -> None:
    """Handle signals that a shell's job in the background or under nohup ignores, as would all that it starts.

    What the tests start has no handler any more, and so the default; the tests themselves outlive their terminal.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture
def entrypoint(tmp_path: Path) -> Entrypoint:
    return Entrypoint(tmp_path)


@pytest.fixture(autouse=True)
def _no_foreign_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


def paint(folder: Path, classes: int = 3, each: int = 8, size: tuple[int, int] = (16, 16), mode: str = "RGB") -> None:
    """Write real image files, a color or gray a class with noise on it, PNG and JPEG by turns."""
    random = np.random.default_rng(folder.name == "test")  # which shares no image with train
    for label in range(classes):
        place = folder / f"class{label}"
        place.mkdir(parents=True)
        for index in range(each):
            channels = (3,) if mode == "RGB" else ()
            level = 40 + 170 * label // max(1, classes - 1)
            pixels = (level + random.integers(-30, 30, size=(size[1], size[0], *channels))).clip(0, 255)
            suffix = "png" if index % 2 else "jpg"
            Image.fromarray(pixels.astype(np.uint8), mode).save(place / f"{index:03}.{suffix}")


@pytest.fixture
def port() -> int:
    """Return a port of this host that nobody uses."""
    return free_port()


@pytest.fixture
def torchvision() -> Any:
    """Return torchvision, or skip the test where it cannot be loaded, as for another version of torch."""
    return pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))


@pytest.fixture
def removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that was removed."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """A small image folder: 3 classes, 24 train and 12 test images of 16x16."""
    folder = tmp_path / "images"
    paint(folder / "train", each=8)
    paint(folder / "test", each=4)
    return folder


@pytest.fixture(scope="session")
def cifar10_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real CIFAR-10 as JPEGs: CIFAR10_IMAGES names the unpacked folder, or the archive."""
    place = os.environ.get("CIFAR10_IMAGES")
    if not place or not Path(place).exists():
        pytest.skip("needs the real CIFAR-10 images: set CIFAR10_IMAGES to their folder or .tar.xz")
    return unpacked_images(Path(place), tmp_path_factory.mktemp("cifar10"))


TreeBuilder = Callable[..., Path]


@pytest.fixture
def built_machine(tmp_path: Path) -> TreeBuilder:
    """Builds a root folder with /sys and /proc of a machine that is not here; the arguments are those of `smp`."""

    def build(sockets: int = 1, cores_per_socket: int = 2, threads_per_core: int = 1, **more: Any) -> Path:
        return smp(sockets, cores_per_socket, threads_per_core, **more).build(tmp_path / "root")

    return build


@pytest.fixture
def under_quota() -> Iterator[Callable[[float], tuple[str, ...]]]:
    """Returns for a number of CPUs the words that start a command in a real cgroup with that quota."""
    with ExitStack() as made:

        def limit(cpus: float) -> tuple[str, ...]:
            try:
                return made.enter_context(quota(cpus))
            except OSError as error:
                pytest.skip(f"needs a cgroup that it may make: {error}")

        yield limit


@pytest.fixture
def limited() -> Iterator[tuple[str, ...]]:
    """The words that start a command in a real cgroup with 1,500 MiB of memory."""
    with ExitStack() as made:
        try:
            words = made.enter_context(memory_limit(1500 << 20))
        except OSError as error:
            pytest.skip(f"needs a memory cgroup that it may make: {error}")
        yield words
