"""Convert a notebook to a script that ranks can run, with nbconvert."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from entrypoint.core.atomic_files import atomic_write_text
from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.paths import resolve
from entrypoint.core.user_dirs import PRIVATE, user_cache_dir
from entrypoint.plan.model import Plan

# nbconvert writes line magics and shell commands as calls of IPython's get_ipython(), which a script does not have.
PRELUDE = '''\
import sys
sys.path[0] = {folder!r}


class _NotebookMagics:
    """Skips magics and shell commands of a notebook; runs a statement that is only timed."""

    def run_line_magic(self, name, line, *_):
        if name == "time":
            frame = sys._getframe(1)
            try:
                return eval(line, frame.f_globals, frame.f_locals)
            except SyntaxError:
                return exec(line, frame.f_globals, frame.f_locals)
        print(f"entrypoint: skipped %{{name}} {{line}}", file=sys.stderr)

    def system(self, command):
        print(f"entrypoint: skipped !{{command}}", file=sys.stderr)

    getoutput = magic = system

    def run_cell_magic(self, name, line, cell):
        print(f"entrypoint: skipped a cell of %%{{name}}", file=sys.stderr)


def get_ipython():
    return _NotebookMagics()


def display(*objects, **_):
    print(*objects)


'''
# Options of %%timeit, before the statement that it runs once (IPython's built-in magics).
TIMEIT_OPTIONS = re.compile(r"\s*-([nrp] *\d+|[tcqo]+)(?=\s|$)")


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
    path = Path(f"{notebook.stem}-{digest}.py")
    try:
        folder = user_cache_dir(os.environ) or Path(tempfile.gettempdir(), PRIVATE.format(os.getuid()))
        path = folder / "notebooks" / path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write_text(path, code)
    except OSError as error:
        raise UserError(f"run {printable(notebook)}: {path} cannot be written ({error.strerror})") from None
    return path


def convert(notebook: Path) -> str:
    """Return a notebook's code cells as one script.

    Raises `UserError` if it is no notebook, is not in Python, or has what works in Jupyter alone.
    """
    import nbformat
    from nbconvert import PythonExporter

    try:
        content = nbformat.read(str(notebook), as_version=4)  # type: ignore[no-untyped-call]
        check_language(notebook, content.metadata)
        for cell in content.cells:
            if cell.cell_type == "code":
                cell.source = without_timing(notebook, cell.source)
        code, _ = PythonExporter().from_notebook_node(content)  # type: ignore[no-untyped-call]
    except UserError:
        raise
    except Exception as error:  # nbformat raises its own, jsonschema's and json's errors
        raise UserError(
            f"run {printable(notebook)}: cannot be converted ({first_line(error)}). Save it again in Jupyter."
        ) from None
    prelude = PRELUDE.format(folder=str(resolve(notebook).parent))
    script = code
    try:
        with warnings.catch_warnings(action="ignore"):  # Python prints them when it runs the script
            imports, rest = split_future_imports(code)
            script = imports + prelude + rest
            compile(script, "<notebook>", "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (script.splitlines() or [""])[min(error.lineno or 1, len(script.splitlines())) - 1].strip()
        waits = "await" in error.msg or "async" in error.msg
        fix = "Use asyncio.run(…): a script has no running event loop." if waits else "Correct the cell."
        raise UserError(f"run {printable(notebook)}: {error.msg}, in `{printable(line)}`. {fix}") from None
    return script


def check_language(notebook: Path, metadata: Mapping[str, Any]) -> None:
    """Raise `UserError` if the notebook's kernel runs another language than Python."""
    named = (metadata.get("kernelspec", {}).get("language"), metadata.get("language_info", {}).get("name"))
    language = next((str(name) for name in named if name), "python")
    if "python" not in language.lower():
        raise UserError(f"run {printable(notebook)}: a notebook in {printable(language)}. Only Python's can run.")


def without_timing(notebook: Path, source: str) -> str:
    """Return a cell without %%time, %%timeit and %%capture, whose code then runs like any other.

    Raises `UserError` for a %%capture into a variable, which a script does not have.
    """
    first, _, rest = source.lstrip("\n").partition("\n")
    name, _, line = first.partition(" ")
    if name == "%%capture" and any(not word.startswith("-") for word in line.split()):
        raise UserError(
            f"run {printable(notebook)}: `{printable(first.strip())}` keeps the output in a variable, which works in"
            " Jupyter alone. Remove the variable."
        )
    if name not in ("%%time", "%%timeit", "%%capture"):
        return source
    setup = line if name == "%%timeit" else ""
    while option := TIMEIT_OPTIONS.match(setup):
        setup = setup[option.end() :]
    return f"{setup.strip()}\n{without_timing(notebook, rest)}"


def split_future_imports(code: str) -> tuple[str, str]:
    """Return the `from __future__` lines of all cells, which a script has first, and the code without them.

    Raises `SyntaxError`.
    """
    found = [node for node in ast.parse(code).body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    lines = code.encode().splitlines(keepends=True)
    for node in reversed(found):
        last = (node.end_lineno or node.lineno) - 1
        after = lines[last][node.end_col_offset :]
        before = lines[node.lineno - 1][: node.col_offset]
        lines[node.lineno - 1 : last + 1] = [before + b"pass" + after]
    return "".join(f"{ast.unparse(node)}\n" for node in found), b"".join(lines).decode()
