"""Convert a notebook to a script that ranks can run, with nbconvert."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from entrypoint.core.atomic_files import atomic_write_text
from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.user_dirs import PRIVATE, user_cache_dir
from entrypoint.plan.model import Plan

# nbconvert writes line magics and shell commands as calls of IPython's get_ipython(), which a script does not have.
PRELUDE = '''\
import sys
sys.path[0] = {folder!r}


class _NotebookMagics:
    """Skips magics and shell commands of a notebook; runs the code of a cell that is only timed."""

    def run_line_magic(self, name, line, *_):
        print(f"entrypoint: skipped %{{name}} {{line}}", file=sys.stderr)

    def system(self, command):
        print(f"entrypoint: skipped !{{command}}", file=sys.stderr)

    getoutput = magic = system

    def run_cell_magic(self, name, line, cell):
        if name in ("time", "timeit", "capture"):
            return exec(compile(cell, {notebook!r}, "exec"), globals())
        print(f"entrypoint: skipped a cell of %%{{name}}", file=sys.stderr)


def get_ipython():
    return _NotebookMagics()


'''


def check_nbconvert(notebook: str) -> None:
    """Raise `UserError` if nbconvert or IPython, which translates magics for it, is not installed."""
    missing = [name for name in ("nbconvert", "IPython") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"run {printable(notebook)}: {' and '.join(missing)} not installed here, and a notebook needs them."
            " Install them (pip install nbconvert ipython), or save the notebook as a script.",
            ExitCode.MACHINE,
        )


def with_converted_notebook(plan: Plan) -> Plan:
    """Return the plan with the notebook's script as its program, written to the user's cache.

    Raises `UserError` if the notebook cannot be converted or the script cannot be written.
    """
    python, notebook, *arguments = plan.program.argv
    script = write_script(Path(notebook))
    program = replace(plan.program, argv=(python, str(script), *arguments))
    command = program.argv if plan.command == plan.program.argv else plan.command
    return replace(plan, program=program, command=command)


def write_script(notebook: Path) -> Path:
    """Return the file with the notebook's code; its name holds a digest of it."""
    code = convert(notebook)
    digest = hashlib.blake2b(code.encode(), digest_size=8).hexdigest()
    folder = user_cache_dir(os.environ) or Path(tempfile.gettempdir(), PRIVATE.format(os.getuid()))
    path = folder / "notebooks" / f"{notebook.stem}-{digest}.py"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write_text(path, code)
    except OSError as error:
        raise UserError(f"run {printable(notebook)}: {path} cannot be written ({error.strerror})") from None
    return path


def convert(notebook: Path) -> str:
    """Return a notebook's code cells as one script; raises `UserError` if it is no notebook."""
    from nbconvert import PythonExporter

    try:
        code, _ = PythonExporter().from_filename(str(notebook))  # type: ignore[no-untyped-call]
    except Exception as error:  # nbformat raises its own, jsonschema's and json's errors
        raise UserError(
            f"run {printable(notebook)}: cannot be converted ({first_line(error)}). Save it again in Jupyter."
        ) from None
    prelude = PRELUDE.format(folder=str(notebook.resolve().parent), notebook=notebook.name)
    lines = code.splitlines(keepends=True)
    future = max((index + 1 for index, line in enumerate(lines) if line.startswith("from __future__")), default=0)
    return "".join((*lines[:future], prelude, *lines[future:]))
