"""The program that `run` starts: a script, a module or a notebook, or what to type instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from entrypoint.core.errors import UserError, printable, refuse_if
from entrypoint.core.files import exists, is_file, is_folder, working_folder
from entrypoint.plan.model import Program

# What Python runs, and what becomes a script.
PYTHON_SUFFIXES = (".py", ".pyz", ".pyc", ".zip", ".ipynb")
# Programs that start ranks themselves, and what may follow their options to have the entrypoint run under them.
LAUNCHER_PROGRAMS = {
    **dict.fromkeys(("torchrun", "accelerate"), "-m entrypoint run"),
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "srun"), "entrypoint run"),
    "deepspeed": "--module entrypoint run",
    "horovodrun": "",
}


def find_program(words: Sequence[str]) -> Program:
    """Return the user's own program; raises `UserError` where the script does not exist."""
    if not words:
        raise UserError("run: no script. Use `entrypoint run SCRIPT` or `entrypoint run -m MODULE`.")
    if words[0] == "-m":
        if len(words) == 1:
            raise UserError("run -m: no module. Use `entrypoint run -m MODULE`.")
        return Program("module", (sys.executable, "-m", *words[1:]))
    script = Path(words[0])
    there, folder = exists(words[0]), is_folder(words[0])
    may_be_script = folder or (there and script.suffix in PYTHON_SUFFIXES)
    if not may_be_script and (advice := not_a_script(words)):
        raise UserError(advice)
    name = printable(words[0])
    here = printable(str(working_folder() or "")) or "the working folder, which was removed"
    refuse_if(
        {
            f"{name}: no such script in {here}. Check the path.": not there,
            f"{name}: a folder without __main__.py. Name the script in it.": (
                folder and not exists(script / "__main__.py")
            ),
            f"{name}: a pipe or device, which can be read only once. Save the script as a file.": (
                not folder and not is_file(script)
            ),
        }
    )
    if script.suffix == ".ipynb":
        from entrypoint.launch.notebook import read_cells

        read_cells(script)  # raises for what no script can do, before anything is started
        return Program("notebook", (sys.executable, *words))
    if problem := why_not_python(script):
        raise UserError(f"{name}: {problem}")
    return Program("script", (sys.executable, *words))


def not_a_script(words: Sequence[str]) -> str:
    """Return what to type instead of words that are no script, such as `torchrun x.py`; empty if they may be one."""
    name = Path(words[0]).name
    script = printable(next((word for word in words[1:] if word.endswith((".py", ".ipynb"))), "SCRIPT"))
    if re.fullmatch(r"python[0-9.]*", name):
        return f"run {printable(words[0])}: it starts Python itself. Use `entrypoint run {script} …`."
    if name in LAUNCHER_PROGRAMS:
        flag = "--launcher torchrun " if name == "torchrun" else ""
        start, under = "accelerate launch" if name == "accelerate" else name, LAUNCHER_PROGRAMS[name]
        other = f", or `{start} … {under} {script} …`" if under else ""
        return f"run {name}: the entrypoint starts the ranks itself. Use `entrypoint run {flag}{script} …`{other}."
    if words[0].startswith("-"):
        return f"run {printable(words[0])}: no such flag before the script. See `entrypoint run --help`."
    return ""


def why_not_python(script: Path) -> str:
    """Return why a file is no Python script, and what to type instead; empty if it may be one."""
    if is_folder(script) or script.suffix in PYTHON_SUFFIXES:
        return ""
    try:
        with script.open("rb") as file:
            start = file.read(256)
    except OSError as error:
        return f"cannot be read ({error.strerror}). Check its permissions."
    if start.startswith(b"\x7fELF"):
        return "a program, no Python script. Use `entrypoint run SCRIPT …`."
    first = start.split(b"\n", 1)[0]
    if (first.startswith(b"#!") and b"python" not in first) or script.suffix == ".sh":
        start_as = script if len(script.parts) > 1 else f"./{script}"
        return (
            "not a Python script. Put `entrypoint run YOUR.py` into it where it calls python, and start it by itself:"
            f" {printable(start_as)}"
        )
    return ""
