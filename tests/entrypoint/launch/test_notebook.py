"""A notebook runs as a script, on several ranks too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from entrypoint.launch.notebook import check_nbconvert, convert
from tests.conftest import Entrypoint, needs_two_cores


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
