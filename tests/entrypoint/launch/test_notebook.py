"""A notebook runs as a script, on several ranks too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from entrypoint.launch.notebook import check_nbconvert, convert
from tests.conftest import Entrypoint, needs_two_cores


def write_notebook(path: Path, *cells: str, language: str = "python") -> Path:
    """Write a notebook with code cells, as Jupyter saves it."""
    one = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    text = {"cell_type": "markdown", "metadata": {}, "source": "# The book's chapter"}
    content = {
        "cells": [text, *({**one, "source": cell} for cell in cells)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": language}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    path.write_text(json.dumps(content))
    return path


@pytest.mark.launch
def test_notebook_runs_with_arguments_magics_and_neighbors(entrypoint: Entrypoint) -> None:
    pytest.importorskip("nbconvert")
    pytest.importorskip("IPython")
    (entrypoint.folder / "sub").mkdir()
    (entrypoint.folder / "sub/helper.py").write_text("WORD = 'helped'")
    write_notebook(
        entrypoint.folder / "sub/x.ipynb",
        "from __future__ import annotations",
        "%matplotlib inline\n!echo shell",
        "import sys, helper\nprint(helper.WORD, sys.argv[1:])",
        "%%time\ntimed = 3",
        "%%bash\nrm -rf nothing",
        "print('timed', timed)",
    )
    result = entrypoint("run", "--quiet", "sub/x.ipynb", "--lr", "0.1")
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["helped ['--lr', '0.1']", "timed 3"]
    for skipped in ("%matplotlib inline", "!echo shell", "a cell of %%bash"):
        assert f"entrypoint: skipped {skipped}" in result.err


@pytest.mark.slow
@pytest.mark.launch
@needs_two_cores
def test_notebook_trains_on_two_ranks(entrypoint: Entrypoint) -> None:
    pytest.importorskip("nbconvert")
    pytest.importorskip("IPython")
    write_notebook(
        entrypoint.folder / "x.ipynb",
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')",
        "total = torch.ones(1)\ndist.all_reduce(total)",
        "print('sum', int(total), flush=True)\ndist.destroy_process_group()",
    )
    result = entrypoint("run", "--quiet", "--nproc-per-node", "2", "x.ipynb")
    assert result.code == 0, result.err
    assert [line for line in result.out.splitlines() if line.startswith("sum")] == ["sum 2"] * 2


@pytest.mark.slow_except("command0")
@pytest.mark.launch
@pytest.mark.parametrize("command", [("plan", "run"), ("run",)])
def test_plan_and_run_refuse_the_same_notebook(entrypoint: Entrypoint, command: tuple[str, ...]) -> None:
    pytest.importorskip("nbconvert")
    pytest.importorskip("IPython")
    write_notebook(entrypoint.folder / "x.ipynb", "await f()")
    result = entrypoint(*command, "x.ipynb")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("entrypoint: error: run x.ipynb: 'await' outside function, in `await f()`.")


@pytest.mark.launch
def test_file_that_is_no_notebook_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert")
    pytest.importorskip("IPython")
    path = tmp_path / "x.ipynb"
    path.write_text("print('no JSON')")
    with pytest.raises(UserError, match=r"cannot be converted \(.*\)\. Save it again in Jupyter\.") as error:
        convert(path)
    assert len(str(error.value).splitlines()) == 1


def test_missing_nbconvert_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.launch.notebook.find_spec", lambda _: None)
    with pytest.raises(
        UserError, match=r"run x\.ipynb: nbconvert and IPython not installed .*pip install nbconvert ipython"
    ) as error:
        check_nbconvert("x.ipynb")
    assert error.value.code == 3


def run_cells(folder: Path, *cells: str) -> dict[str, object]:
    """Convert code cells and run the script, as Python does; return its variables."""
    pytest.importorskip("nbconvert")
    pytest.importorskip("IPython")
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(convert(write_notebook(folder / "x.ipynb", *cells)), "x.py", "exec", dont_inherit=True), names)
    return names


CELLS = {
    "display": (("display(1, 'a')",), "1 a\n"),
    "a timed cell": (("%%time\nz = 3", "print(z)"), "3\n"),
    "a timed cell after an empty line": (("\n%%time\nz = 3", "print(z)"), "3\n"),
    "the setup of timeit": (("%%timeit -n1 -r 2 z=1\nprint(z)",), "1\n"),
    "timeit without a setup": (("%%timeit -n 10 -q\nprint(2)",), "2\n"),
    "capture without a variable": (("%%capture --no-stderr\nprint(1)",), "1\n"),
    "two cell magics": (("%%capture\n%%time\nprint(1)",), "1\n"),
    "a timed statement": (("%time z = 4", "y = %time z + 1", "print(z, y)"), "4 5\n"),
    "a string with a line of an import": (("s = '''\nfrom __future__ import annotations\n'''\nprint(len(s))",), "36\n"),
    "an import in a later cell": (("x = 'ä'", "'ä'; from __future__ import annotations; print(x)"), "ä\n"),
    "an import over several lines": (
        ("'doc'\nfrom __future__ import (\n    annotations,\n    division,\n)\ndef f(x: y): pass\nprint(1)",),
        "1\n",
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells_print_what_jupyter_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    cells, printed = CELLS[name]
    run_cells(tmp_path, *cells)
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("cell", "language", "said"),
    [
        ("print('a')", "R", "a notebook in R. Only Python's can run."),
        ("await f()", "python", "'await' outside function, in `await f()`. Use asyncio.run"),
        ("%%time\nasync with f: pass", "python", "'async with' outside async function, in `async with f: pass`."),
        ("%%capture out\nprint(1)", "python", "`%%capture out` keeps the output in a variable, which works in Jupyter"),
        ("x = = 1", "python", "invalid syntax, in `x = = 1`. Correct the cell."),
    ],
)
def test_what_no_script_can_do_is_one_line(cell: str, language: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("nbconvert")
    pytest.importorskip("IPython")
    path = write_notebook(tmp_path / "x.ipynb", cell, language=language)
    with pytest.raises(UserError) as error:
        convert(path)
    assert str(error.value).startswith(f"run {path}: {said}"), error.value
    assert len(str(error.value).splitlines()) == 1
