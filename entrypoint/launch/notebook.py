"""Run a notebook's code cells as Jupyter does, as `python -m entrypoint.launch.notebook x.ipynb`.

IPython runs them in the rank's own process, without a kernel. Rank 0 leaves `x.executed.ipynb` with what they printed
and drew.
"""

from __future__ import annotations

import ast
import os
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from entrypoint.core.atomic_files import atomic_write_text
from entrypoint.core.console import log_once
from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.own_modules import STARTER
from entrypoint.core.paths import resolve
from entrypoint.plan.model import Plan

STREAMS = {"out_stream": "stdout", "err_stream": "stderr"}


def with_notebook_runner(plan: Plan) -> Plan:
    """Return the plan with the program that runs its notebook; -P keeps the working folder out of its imports."""
    python, *words = plan.program.argv
    program = replace(plan.program, argv=(python, "-P", STARTER, "--module", "entrypoint.launch.notebook", *words))
    command = program.argv if plan.command == plan.program.argv else plan.command
    return replace(plan, program=program, command=command)


def read_notebook(notebook: Path) -> Any:
    """Return a notebook as nbformat reads it; raises `UserError` where its cells cannot run."""
    where = f"run {printable(notebook)}"
    try:
        import nbformat
        from IPython.core.inputtransformer2 import TransformerManager

        content = nbformat.read(str(notebook), as_version=4)  # type: ignore[no-untyped-call]
    except ImportError as error:
        fix = "Run: pip install 'reference-training[notebook]', or save the notebook as a script."
        raise UserError(f"{where}: needs {error.name}, which is not here. {fix}", ExitCode.MACHINE) from None
    except Exception as error:  # nbformat raises its own, jsonschema's and json's errors
        raise UserError(f"{where}: cannot be read ({first_line(error)}). Save it again in Jupyter.") from None
    for number, cell in enumerate(code_cells(content), 1):
        plain = TransformerManager().transform_cell(cell.source)  # type: ignore[no-untyped-call]
        try:
            compile(plain, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            line = printable((error.text or "").strip())
            raise UserError(f"{where}: cell {number}: {error.msg}, in `{line}`. Correct the cell.") from None
    return content


def code_cells(content: Any) -> list[Any]:
    """Return a notebook's code cells."""
    return [cell for cell in content.cells if cell.cell_type == "code"]


def start_shell(names: Mapping[str, Any], folder: str) -> Any:
    """Return an IPython in a new `__main__` with some names, where pickles find what cells define.

    It keeps its files in `folder`, and prints the traceback of a failed cell as Python does.
    """
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        def _showtraceback(self, kind: type, _error: BaseException, lines: list[str]) -> None:
            if kind is not SystemExit:
                print("\n".join(lines), file=sys.stderr)

    main_module = types.ModuleType("__main__")
    vars(main_module).update(names)
    of_shell = {"colors": "nocolor", "xmode": "Plain", "ipython_dir": folder}
    config = Config(HistoryManager={"enabled": False}, InteractiveShell=of_shell)
    return Shell.instance(config=config, user_module=main_module, user_ns=vars(main_module))


def outputs_of(shell: Any, count: int) -> list[Any]:
    """Return what a cell printed, drew and raised, as nbformat has it."""
    from nbformat.v4 import new_output

    outputs = []
    for output in shell.history_manager.outputs.get(count, ()):
        kind, bundle = output.output_type, output.bundle
        if kind in STREAMS:
            outputs.append(new_output("stream", name=STREAMS[kind], text="".join(bundle["stream"])))  # type: ignore[no-untyped-call]
        else:
            numbered = {"execution_count": count} if kind == "execute_result" else {}
            outputs.append(new_output(kind, data=dict(bundle), **numbered))  # type: ignore[no-untyped-call]
    if error := shell.history_manager.exceptions.get(count):
        outputs.append(new_output("error", **error))  # type: ignore[no-untyped-call]
    return outputs


def run_cells(shell: Any, content: Any, target: Path | None) -> None:
    """Run a notebook's cells, and save it after each if it has a target; raises what a cell raises."""
    import nbformat

    for cell in code_cells(content):
        count = shell.execution_count
        result = shell.run_cell(cell.source, store_history=True)
        cell.execution_count, cell.outputs = count, outputs_of(shell, count)
        if target:
            try:
                atomic_write_text(target, nbformat.writes(content))  # type: ignore[no-untyped-call]
            except OSError as error:
                log_once(f"{printable(target)}: cannot be written ({error.strerror}); the notebook goes on")
        if not result.success:
            sys.excepthook = lambda *_: None  # IPython has printed the error
            result.raise_error()


def main() -> None:
    """Run the cells; an exception ends the process as it ends a script."""
    sys.argv = sys.argv[1:]
    notebook = Path(sys.argv[0])
    content = read_notebook(notebook)
    is_first = os.environ.get("RANK", "0") == "0"
    target = notebook.with_suffix(".executed.ipynb") if is_first else None
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # figures become outputs
    warnings.filterwarnings("ignore", "To exit: use")  # what IPython advises at a cell's sys.exit()
    sys.path.insert(0, str(resolve(notebook).parent))
    with TemporaryDirectory(prefix="notebook-") as folder:
        run_cells(start_shell({"__file__": sys.argv[0]}, folder), content, target)


if __name__ == "__main__":
    main()
