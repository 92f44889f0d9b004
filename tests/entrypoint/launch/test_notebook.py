"""A notebook runs as a script, on several ranks too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from entrypoint.launch.notebook import compile_cells, main
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
    pytest.importorskip("nbformat")
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
    pytest.importorskip("nbformat")
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
    pytest.importorskip("nbformat")
    pytest.importorskip("IPython")
    write_notebook(entrypoint.folder / "x.ipynb", "await f()")
    result = entrypoint(*command, "x.ipynb")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("entrypoint: error: run x.ipynb: cell 1: 'await' outside function, in `await f()`.")


@pytest.mark.launch
def test_file_that_is_no_notebook_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("nbformat")
    pytest.importorskip("IPython")
    path = tmp_path / "x.ipynb"
    path.write_text("print('no JSON')")
    with pytest.raises(UserError, match=r"cannot be converted \(.*\)\. Save it again in Jupyter\.") as error:
        compile_cells(path)
    assert len(str(error.value).splitlines()) == 1


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nbformat", None)
    with pytest.raises(
        UserError, match=r"x\.ipynb: needs nbformat, .*pip install .reference-training.notebook"
    ) as error:
        compile_cells(write_notebook(tmp_path / "x.ipynb", "1"))
    assert error.value.code == 3


CELLS = {
    "display": (("display(1, 'a')",), "1 a\n"),
    "a timed cell": (("%%time\nz = 3", "print(z)"), "3\n"),
    "two cell magics": (("%%capture --no-stderr\n%%time\nprint(1)",), "1\n"),
    "a timed statement": (("%time z = 4", "y = %time z + 1", "print(z, y)"), "4 5\n"),
    "an import in an earlier cell": (("from __future__ import annotations", "def f(x: y): print('ä')\nf(1)"), "ä\n"),
    "a pickled function": (("import pickle\ndef f(): print(1)", "pickle.loads(pickle.dumps(f))()"), "1\n"),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells_print_what_jupyter_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbformat")
    pytest.importorskip("IPython")
    cells, printed = CELLS[name]
    monkeypatch.setattr(sys, "argv", ["notebook", str(write_notebook(tmp_path / "x.ipynb", *cells))])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    main()
    assert capsys.readouterr().out == printed


@pytest.mark.launch
def test_traceback_names_cell_and_line(entrypoint: Entrypoint) -> None:
    pytest.importorskip("nbformat")
    pytest.importorskip("IPython")
    write_notebook(entrypoint.folder / "x.ipynb", "def f():\n    return 1 / 0", "1\nf()")
    result = entrypoint("run", "--quiet", "x.ipynb")
    assert result.code == 1
    assert 'File "x.ipynb, cell 2", line 2, in <module>\n    f()' in result.err
    assert 'File "x.ipynb, cell 1", line 2, in f\n    return 1 / 0' in result.err


@pytest.mark.parametrize(
    ("cell", "language", "said"),
    [
        ("print('a')", "R", "a notebook in R. Only Python's can run."),
        ("await f()", "python", "cell 1: 'await' outside function, in `await f()`. Use asyncio.run"),
        ("async with f: pass", "python", "cell 1: 'async with' outside async function, in `async with f: pass`."),
        ("x = = 1", "python", "cell 1: invalid syntax, in `x = = 1`. Correct the cell."),
    ],
)
def test_what_no_script_can_do_is_one_line(cell: str, language: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("nbformat")
    pytest.importorskip("IPython")
    path = write_notebook(tmp_path / "x.ipynb", cell, language=language)
    with pytest.raises(UserError) as error:
        compile_cells(path)
    assert str(error.value).startswith(f"run {path}: {said}"), error.value
    assert len(str(error.value).splitlines()) == 1
