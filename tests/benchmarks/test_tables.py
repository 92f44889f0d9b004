"""Samples by variant: medians, ranges and ratios, and the printed table."""

from __future__ import annotations

import pytest

from benchmarks.tables import Table, figure


def seconds() -> Table:
    """Return a table of seconds with a base, another variant and a missing one."""
    table = Table("one rank", "s", "python", missing={"accelerate": "not installed"})
    table.add("python", 0.02, 0.04, 0.03)
    table.add("ours", 0.3)
    table.add("ours", 0.2, 0.1)
    return table


def test_every_sample_is_kept_and_compared_with_the_base() -> None:
    table = seconds()
    assert table.samples == {"python": [0.02, 0.04, 0.03], "ours": [0.3, 0.2, 0.1]}
    assert (table.median("ours"), table.range("ours")) == (0.2, "0.100-0.300")
    assert table.over("ours") == pytest.approx(0.17)
    assert table.ratio("ours") == pytest.approx(0.2 / 0.03)


def test_table_without_its_base_has_no_ratio() -> None:
    table = Table("rate", "images/s", "by hand")
    table.add("ours", 10.0)
    assert (table.over("ours"), table.ratio("ours"), table.quartiles("ours")) == (None, None, (10.0, 10.0, 10.0))
    table.add("by hand", 0.0)
    assert table.ratio("ours") is None


def test_printed_table_has_a_row_for_each_variant() -> None:
    lines = seconds().text().splitlines()
    assert lines[1].split() == ["one", "rank,", "s", "median", "range", "n", "to", "python"]
    assert lines[2].split() == ["python", "0.030", "0.020-0.040", "3"]
    assert lines[3].split() == ["ours", "0.200", "0.100-0.300", "3", "6.67", "(+0.170", "s)"]
    assert lines[4].split() == ["accelerate", "not", "installed"]


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (99.44, "99.4"), (1.234, "1.23"), (0.01234, "0.012"), (-0.5, "-0.500")]
)
def test_figure_has_about_three_digits(value: float, text: str) -> None:
    assert figure(value) == text
