"""Older programs with today's packages: after the traceback stands what to type."""

from __future__ import annotations

import pytest

from entrypoint.rank.script_errors import advice
from tests.conftest import Entrypoint

# What the book's programs end with: NNI 3, no bindings, the bindings not imported (torch 2.8 and 2.15), MPI of a wheel.
ERRORS = [
    (ModuleNotFoundError("No module named 'nni.compression.pytorch'"), "from nni.compression.pruning import"),
    (ModuleNotFoundError("No module named 'oneccl_bindings_for_pytorch'"), 'backend="gloo"'),
    (AssertionError("Unknown c10d backend type CCL"), 'backend="gloo"'),
    (AssertionError("Unknown backend type ccl"), 'backend="gloo"'),
    (RuntimeError("Distributed package doesn't have MPI built in. MPI is only included if …"), 'backend="gloo"'),
    (ModuleNotFoundError("No module named 'oneccl'"), ""),
    (ValueError(), ""),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=lambda value: str(value)[:40])
def test_advice_says_what_to_type(error: Exception, expected: str) -> None:
    assert expected in advice(error)
    assert bool(advice(error)) is bool(expected)


@pytest.mark.launch
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_traceback_of_a_script_ends_with_advice(entrypoint: Entrypoint, ranks: str) -> None:
    script = entrypoint.folder / "x.py"
    script.write_text("import oneccl_bindings_for_pytorch\n")
    result = entrypoint("run", str(script), env={"LAUNCH_NPROC_PER_NODE": ranks, "LAUNCH_OVERSUBSCRIBE": "1"})
    assert result.code == 1
    assert "entrypoint: oneCCL's bindings are not on PyPI" in result.err


@pytest.mark.launch
def test_handled_errors_and_others_get_no_advice(entrypoint: Entrypoint) -> None:
    script = entrypoint.folder / "x.py"
    script.write_text(
        "try:\n    import oneccl_bindings_for_pytorch\nexcept ImportError:\n    pass\nraise SystemExit('mine')\n"
    )
    result = entrypoint("run", str(script))
    assert "oneCCL" not in result.err
    assert "mine" in result.err
