"""Run a notebook's code cells as Jupyter does, as `python -m entrypoint.launch.notebook x.ipynb`.

IPython runs them in the rank's own process, without a kernel. What they print and raise is shown as a script's is.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from pathlib import Path

from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.files import resolve
from entrypoint.core.process import STARTER
from entrypoint.plan.model import Plan


def with_notebook_runner(plan: Plan) -> Plan:
    """Return the plan with the program that runs its notebook; -P keeps the working folder out of its imports."""
    python, *words = plan.program.argv
    program = replace(plan.program, argv=(python, "-P", STARTER, "--module", "entrypoint.launch.notebook", *words))
    return replace(plan, program=program)


def read_cells(notebook: Path) -> list[str]:
    """Return the code cells of a notebook; raises `UserError` where they cannot run."""
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
    language = content.metadata.get("kernelspec", {}).get("language", "python").lower()
    if language != "python":
        raise UserError(f"{where}: is a notebook of {printable(language)}. Save it as a script of Python.")
    cells = [cell.source for cell in content.cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells, 1):
        try:
            plain = TransformerManager().transform_cell(cell)  # type: ignore[no-untyped-call]
            compile(plain, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            line = printable((error.text or "").strip())
            raise UserError(f"{where}: cell {number}: {error.msg}, in `{line}`. Correct the cell.") from None
    return cells


def main() -> None:
    """Run the cells; an exception ends the process as it ends a script."""
    sys.argv = sys.argv[1:]
    notebook = Path(sys.argv[0])
    cells = read_cells(notebook)
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        def _showtraceback(self, kind: type, _error: BaseException, lines: list[str]) -> None:
            if kind is not SystemExit:
                print("\n".join(lines), file=sys.stderr)

        def ask_exit(self) -> None:
            sys.exit()

        def enable_gui(self, _gui: object = None) -> None:
            """Open no window: the figures of `%matplotlib inline` stay in memory."""

    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # no cell waits for a window
    warnings.filterwarnings("ignore", "To exit: use")  # what IPython advises at a cell's sys.exit()
    sys.path.insert(0, str(resolve(notebook).parent))
    shell = Shell.instance(config=Config(HistoryManager={"enabled": False}), colors="nocolor", xmode="Plain")
    for cell in cells:
        result = shell.run_cell(cell, store_history=True)  # type: ignore[no-untyped-call]
        if not result.success:
            sys.excepthook = lambda *_: None  # IPython has printed the error
            result.raise_error()


if __name__ == "__main__":
    main()
