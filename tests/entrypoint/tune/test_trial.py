"""The pattern that finds a script's rate in its output."""

from __future__ import annotations

import pytest

from entrypoint.tune.trial import compile_metric, printed_rates
from tests.conftest import refusal


def test_metric_finds_every_rate() -> None:
    text = "1,200 images/s\n2.5 images/s\n"
    metric = compile_metric("([0-9.,]+) images/s")
    assert printed_rates(metric, text) == [1200, 2.5]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "no pattern"),
        ("x{99999999999}", "no pattern"),
        ("x", "needs one group"),
        ("(x)(y)", "needs one group"),
        ("(" * 200 + ")" * 200, "needs one group"),
        ("(\x1b[", "no pattern"),
    ],
)
def test_pattern_that_cannot_find_a_rate_is_refused(pattern: str, said: str) -> None:
    refusal(compile_metric, pattern, match=said)


def test_word_that_is_no_number_is_an_error() -> None:
    refusal(printed_rates, compile_metric("(loss)"), "loss 3", match=r"TUNE_METRIC=\(loss\): finds no number")
