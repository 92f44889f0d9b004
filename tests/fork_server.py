"""Runs commands of the entrypoint as forks of this process, which has imported torch once.

`Forks` in tests/conftest.py starts it, and writes a command a line as JSON. Launcher and ranks are processes as always,
with their environment, pinning, signals and exit codes. A start alone has more: variables of the interpreter, preloaded
libraries, and the import itself.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from entrypoint.__main__ import main
from entrypoint.core.process import module_command, name_process

# What nearly every run imports.
PRELOADED = (
    *("torch", "torch.utils.flop_counter", "torch.utils.tensorboard", "torchvision", "matplotlib.backends.backend_svg"),
    *("entrypoint.cli.commands.train_run", "entrypoint.launch.local", "train.planning.trainer_plan"),
    *("train.engine.trainer", "train.engine.model_probe", "train.data.dataset_probe", "train.report.page"),
    "train.evaluation.predict",
)
OURS = module_command("")[:-1]
EXECUTE, RUN = os.execve, subprocess.run


def end(work: Callable[[], object]) -> NoReturn:
    """End this process with the code of some work, as the interpreter would."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def execute(path: str, argv: Sequence[str], environment: Mapping[str, str]) -> object:
    """Execute a program as `os.execve`, one of this project's modules in this process."""
    if tuple(argv[: len(OURS)]) != OURS or "LD_PRELOAD" in environment:
        return EXECUTE(path, argv, environment)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not os.get_inheritable(descriptor):
                os.close(descriptor)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the process before
    name_process("python")
    os.environ.clear()
    os.environ.update(environment)
    return run_module(argv[len(OURS) :])


def run_module(words: Sequence[str]) -> object:
    """Run one of this project's modules as a program, with the threads of the environment."""
    if "ENTRYPOINT_PLAN" in os.environ:
        importlib.import_module("reference_training.rank_hook")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        importlib.import_module("torch").set_num_threads(int(threads))
    sys.path.remove(sys.path[-1])  # the working folder, which a rank does not have
    sys.argv = [*words]
    sys.modules.pop(words[0], None)  # the program itself is executed again
    gc.enable()
    return runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a program as `subprocess.run`, one of this project's modules as a fork."""
    if tuple(command[: len(OURS)]) != OURS or "input" not in options:
        return RUN(command, **options)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(options["input"])
        given.seek(0)
        child = os.fork()
        if not child:
            for number, file in enumerate((given, out, err)):
                os.dup2(file.fileno(), number)
            end(lambda: execute(command[0], command, os.environ.copy()))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def start(request: Mapping[str, Any]) -> int:
    """Run a command of the entrypoint in this process."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for number, path in enumerate(("/dev/null", request["out"], request["err"])):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.path.append(request["folder"])
    sys.argv = ["entrypoint", *request["words"]]
    os.execve, subprocess.run = execute, run  # type: ignore[assignment]
    sys.exit(main())


def serve() -> None:
    """Run the commands of standard input, one after the other; print the process of each, and its exit code."""
    for name in PRELOADED:
        with suppress(ImportError, RuntimeError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            end(partial(start, json.loads(line)))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    end(serve)
