"""Node lists expanded as `scontrol show hostnames` would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.core.errors import UserError
from entrypoint.job.slurm import expand_hostlist

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
    ("text", "why"),
    [
        *(
            (text, "cannot be read; expected a form like")
            for text in ("", "a,,b", "a,", "a[1-3", "a[]", "a[1-]", "a[1;2]", "a 1", "a]", "a{}", f"a[{'1' * 19}]")
        ),
        ("node[3-1]", "the range 3-1 runs backwards"),
        ("node[1-9999999999]", "more than 1,000,000 nodes"),
        ("a[1-9999][1-9999]", "more than 1,000,000 nodes"),
    ],
)
def test_expand_hostlist_malformed_raises(text: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"^SLURM_JOB_NODELIST.*: .*{why}"):
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
        assert str(refused).startswith("node list")
    else:
        assert all(names)
        assert "[" not in "".join(names)
