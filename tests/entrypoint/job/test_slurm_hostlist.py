"""Node lists expanded as `scontrol show hostnames` would."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.core.errors import UserError
from entrypoint.job.slurm_hostlist import expand_hostlist

LISTS = {
    "login": ["login"],
    "node1,node2": ["node1", "node2"],
    "node[01-03,7],gpu-[1-2]-ib[0,3],login": [
        *("node01", "node02", "node03", "node7"),
        *("gpu-1-ib0", "gpu-1-ib3", "gpu-2-ib0", "gpu-2-ib3", "login"),
    ],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "[1-2]": ["1", "2"],
    "a.b-c[0]": ["a.b-c0"],
}


@pytest.mark.parametrize("text", LISTS)
def test_expand_hostlist_keeps_order(text: str) -> None:
    assert list(expand_hostlist(text)) == LISTS[text]


@pytest.mark.parametrize(
    ("text", "position", "why"),
    [
        ("", 1, "a name is missing"),
        ("node1,,node2", 7, "a name is missing"),
        ("node1,", 7, "a name is missing"),
        ("node[1-3", 5, "a bracket is opened and not closed"),
        ("node[]", 6, "expected a number"),
        ("node[1-]", 7, "expected a comma or a closing bracket"),
        ("node[3-1]", 6, "the range 3-1 runs backwards"),
        ("node[1;2]", 7, "expected a comma"),
        ("node 1", 5, "is no part of a name"),
        ("node]", 5, "is no part of a name"),
        ("node[1-9999999999]", 6, "more than 1,000,000 nodes"),
        ("a[1-9999][1-9999]", 18, "more than 1,000,000 nodes"),
    ],
)
def test_expand_hostlist_malformed_raises_with_position(text: str, position: int, why: str) -> None:
    with pytest.raises(UserError, match=rf"SLURM_JOB_NODELIST: cannot be read at position {position}, .*{why}"):
        expand_hostlist(text, "SLURM_JOB_NODELIST")


def test_expand_hostlist_long_list_is_fast() -> None:
    names = expand_hostlist(",".join(f"rack{rack}-[0000-0999]" for rack in range(200)))
    assert len(set(names)) == 200_000
    assert (names[0], names[-1]) == ("rack0-0000", "rack199-0999")


@given(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True), st.integers(0, 10**6)), min_size=1))
def test_expand_hostlist_round_trip_returns_names(names: list[tuple[str, int]]) -> None:
    flat = [f"{name}x{number:04}" for name, number in names]
    assert list(expand_hostlist(",".join(f"{name}x[{number:04}]" for name, number in names))) == flat
    assert list(expand_hostlist(",".join(flat))) == flat


@given(st.text("abn01-,[]. ", max_size=20))
def test_expand_hostlist_any_text_returns_names_or_raises(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except UserError as refused:
        assert re.search(r"at position \d+", str(refused))
    else:
        assert all(names)
        assert "[" not in "".join(names)
