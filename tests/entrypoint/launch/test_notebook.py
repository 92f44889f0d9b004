"""A notebook runs as a script, on several ranks too."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from entrypoint.launch.notebook import read_cells
from tests.conftest import Entrypoint, needs_two_cores, refusal

pytestmark = pytest.mark.skipif(
    find_spec("nbformat") is None or find_spec("IPython") is None, reason="needs nbformat and IPython"
)


def write_notebook(path: Path, *cells: str) -> Path:
    """Write a notebook with code cells, as Jupyter saves it."""
    one = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    text = {"cell_type": "markdown", "metadata": {}, "source": "# The book's chapter"}
    content = {
        "cells": [text, *({**one, "source": cell} for cell in cells)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    path.write_text(json.dumps(content))
    return path


@pytest.mark.launch
def test_notebook_prints_as_a_script_and_leaves_no_file(entrypoint: Entrypoint) -> None:
    (entrypoint.folder / "sub").mkdir()
    (entrypoint.folder / "sub/helper.py").write_text("WORD = 'helped'")
    write_notebook(
        entrypoint.folder / "sub/x.ipynb",
        "import sys, helper\nprint(helper.WORD, sys.argv[1:])",
        "%%time\ntimed = 3",
        "!echo shell",
        "%matplotlib inline\nimport matplotlib.pyplot as plot\nplot.plot([1, 2])\nplot.show()",
        "import asyncio\nawait asyncio.sleep(0)\ntimed + 1",
        "raise SystemExit(7)",
        "print('never')",
    )
    result = entrypoint("run", "--quiet", "sub/x.ipynb", "--lr", "0.1")
    assert (result.code, result.err) == (7, "")
    assert result.out.startswith("helped ['--lr', '0.1']\n")
    for said in ("Wall time", "shell\n", "<Figure", "Out[5]: 4\n"):
        assert said in result.out
    assert "never" not in result.out
    assert sorted(path.name for path in (entrypoint.folder / "sub").glob("*.*")) == ["helper.py", "x.ipynb"]
    assert not list(entrypoint.home.rglob("history.sqlite"))


@pytest.mark.launch
def test_notebook_ends_where_it_quits(entrypoint: Entrypoint) -> None:
    write_notebook(entrypoint.folder / "x.ipynb", "print('began')\nquit()", "print('never')")
    assert entrypoint.succeed("run", "--quiet", "x.ipynb").out == "began\n"


@pytest.mark.slow
@pytest.mark.launch
@needs_two_cores
def test_notebook_trains_on_two_ranks(entrypoint: Entrypoint) -> None:
    write_notebook(
        entrypoint.folder / "x.ipynb",
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')",
        "total = torch.ones(1)\ndist.all_reduce(total)",
        "print('sum', int(total), flush=True)\ndist.destroy_process_group()",
    )
    result = entrypoint.succeed("run", "--quiet", "--nproc-per-node", "2", "x.ipynb")
    assert [line for line in result.out.splitlines() if line.startswith("sum")] == ["sum 2"] * 2


@pytest.mark.slow_except("command0")
@pytest.mark.launch
@pytest.mark.parametrize("command", [("plan", "run"), ("run",)])
def test_plan_and_run_refuse_the_same_notebook(entrypoint: Entrypoint, command: tuple[str, ...]) -> None:
    write_notebook(entrypoint.folder / "x.ipynb", "1", "x = = 1")
    result = entrypoint(*command, "x.ipynb")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("entrypoint: error: run x.ipynb: cell 2: invalid syntax, in `x = = 1`.")


@pytest.mark.launch
def test_file_that_is_no_notebook_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.ipynb"
    path.write_text("print('no JSON')")
    refusal(read_cells, path, match=r"cannot be read \(.*\)\. Save it again in Jupyter\.")


def test_notebook_of_another_language_is_refused(tmp_path: Path) -> None:
    path = write_notebook(tmp_path / "x.ipynb", "1 + 1")
    path.write_text(path.read_text().replace('"language": "python"', '"language": "R"'))
    refusal(read_cells, path, match="is a notebook of r. Save it as a script of Python.")


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nbformat", None)
    refusal(
        read_cells,
        write_notebook(tmp_path / "x.ipynb", "1"),
        match=r"x\.ipynb: needs nbformat, .*pip install .reference-training.notebook",
        code=3,
    )


@pytest.mark.launch
@pytest.mark.parametrize(("method", "mapped"), [("fork", "f"), ("spawn", "abs")])
def test_cells_start_processes(entrypoint: Entrypoint, method: str, mapped: str) -> None:
    write_notebook(
        entrypoint.folder / "x.ipynb",
        "import multiprocessing, pickle\ndef f(x): return abs(x)",
        "pickle.loads(pickle.dumps(f))(1)",
        f"with multiprocessing.get_context('{method}').Pool(1) as pool: print(pool.map({mapped}, [-3]))",
    )
    result = entrypoint("run", "--quiet", "x.ipynb")
    assert (result.code, result.out) == (0, "Out[2]: 1\n[3]\n"), result.err


@pytest.mark.launch
def test_traceback_names_cell_and_line(entrypoint: Entrypoint) -> None:
    write_notebook(entrypoint.folder / "x.ipynb", "def f():\n    return 1 / 0", "1\nf()")
    result = entrypoint("run", "--quiet", "x.ipynb")
    assert result.code == 1
    assert "Cell In[2], line 2\n    f()" in result.err
    assert "Cell In[1], line 2 in f\n    return 1 / 0" in result.err
    assert result.err.count("ZeroDivisionError: division by zero") == 1
