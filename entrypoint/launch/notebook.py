"""Run a notebook's code cells one after another, as `python -m entrypoint.launch.notebook x.ipynb`."""

from __future__ import annotations

import linecache
import sys
import traceback
import types
from codeop import Compile
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.own_modules import STARTER
from entrypoint.core.paths import resolve
from entrypoint.plan.model import Plan


class Magics:
    """Stands in for IPython: runs what a magic times or captures, and skips other magics and shell commands."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def run_line_magic(self, name: str, line: str, *_: Any) -> Any:
        """Run a timed statement, or return the value of a timed expression."""
        if name != "time":
            return skip(f"%{name} {line}")
        try:
            return eval(line, self.names)
        except SyntaxError:
            return exec(line, self.names)

    def run_cell_magic(self, name: str, _: str, cell: str) -> None:
        """Run a timed or captured cell."""
        if name not in ("time", "capture"):
            return skip(f"a cell of %%{name}")
        return exec(compile(as_python(cell), f"a cell of %%{name}", "exec"), self.names)

    def system(self, command: str) -> None:
        """Skip a shell command."""
        skip(f"!{command}")

    getoutput = system


def skip(what: str) -> None:
    """Say what a script does not do."""
    print(f"entrypoint: skipped {what}", file=sys.stderr)


def with_notebook_runner(plan: Plan) -> Plan:
    """Return the plan with the program that runs its notebook; -P keeps the working folder out of its imports."""
    python, *words = plan.program.argv
    program = replace(plan.program, argv=(python, "-P", STARTER, "--module", "entrypoint.launch.notebook", *words))
    command = program.argv if plan.command == plan.program.argv else plan.command
    return replace(plan, program=program, command=command)


def as_python(source: str) -> str:
    """Return a cell with its magics as calls of IPython's get_ipython()."""
    from IPython.core.inputtransformer2 import TransformerManager

    return str(TransformerManager().transform_cell(source))  # type: ignore[no-untyped-call]


def compile_cells(notebook: Path) -> list[types.CodeType]:
    """Return the code of each cell, which tracebacks name; raises `UserError` for what no script can do."""
    where = f"run {printable(notebook)}"
    language, cells = read_cells(notebook, where)
    if "python" not in language.lower():
        raise UserError(f"{where}: a notebook in {printable(language)}. Only Python's can run.")
    compiler = Compile()  # the future imports of a cell are those of later cells too
    codes: list[types.CodeType] = []
    for number, source in enumerate(cells, 1):
        name = f"{notebook.name}, cell {number}"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            codes.append(compiler(source, name, "exec"))
        except SyntaxError as error:
            fix = "Use asyncio.run(…)" if "'a" in error.msg else "Correct the cell"
            line = printable(linecache.getline(name, error.lineno or 1).strip())
            raise UserError(f"{where}: cell {number}: {error.msg}, in `{line}`. {fix}.") from None
    return codes


def read_cells(notebook: Path, where: str) -> tuple[str, list[str]]:
    """Return a notebook's language, and its code cells as Python; `where` begins the message of a `UserError`."""
    try:
        import nbformat

        content = nbformat.read(str(notebook), as_version=4)  # type: ignore[no-untyped-call]
        language = str(content.metadata.get("kernelspec", {}).get("language", "python"))
        return language, [as_python(cell.source) for cell in content.cells if cell.cell_type == "code"]
    except ImportError as error:
        fix = "Run: pip install 'reference-training[notebook]', or save the notebook as a script."
        raise UserError(f"{where}: needs {error.name}, which is not here. {fix}", ExitCode.MACHINE) from None
    except Exception as error:  # nbformat raises its own, jsonschema's and json's errors
        raise UserError(f"{where}: cannot be converted ({first_line(error)}). Save it again in Jupyter.") from None


def main() -> None:
    """Run the cells in a new `__main__`, where pickles find what they define."""
    sys.argv = sys.argv[1:]
    notebook = Path(sys.argv[0])
    main_module = types.ModuleType("__main__")
    names = vars(main_module)
    names |= {
        "__file__": sys.argv[0],
        "get_ipython": lambda: Magics(names),
        "display": lambda *objects, **_: print(*objects),
    }
    sys.modules["__main__"] = main_module
    codes = compile_cells(notebook)
    sys.excepthook = traceback.print_exception  # unlike the interpreter's own, it shows the lines of cells
    sys.path.insert(0, str(resolve(notebook).parent))
    for code in codes:
        exec(code, names)


if __name__ == "__main__":
    main()
