"""All samples of one table of a benchmark by variant, and the medians, ranges and ratios that follow from them."""

from __future__ import annotations

import statistics

import msgspec

# Samples are kept with so many digits, more than any of them repeats.
DIGITS = 6


class Table(msgspec.Struct):
    """Samples of one unit by variant; `base` names the variant that the others are compared with.

    `missing` has the reason of each variant that did not run. `detail` keeps a table out of the generated page.
    """

    title: str
    unit: str
    base: str = ""
    detail: bool = False
    samples: dict[str, list[float]] = msgspec.field(default_factory=dict)
    missing: dict[str, str] = msgspec.field(default_factory=dict)

    def add(self, variant: str, *values: float) -> None:
        """Add samples of a variant."""
        self.samples.setdefault(variant, []).extend(float(f"{value:.{DIGITS}g}") for value in values)

    def median(self, variant: str) -> float:
        """Return a variant's median."""
        return statistics.median(self.samples[variant])

    def range(self, variant: str) -> str:
        """Return a variant's smallest and largest sample as text."""
        values = self.samples[variant]
        return f"{figure(min(values))}-{figure(max(values))}" if len(values) > 1 else ""

    def quartiles(self, variant: str) -> tuple[float, float, float]:
        """Return a variant's quartiles; a single sample is all three."""
        values = self.samples[variant]
        if len(values) == 1:
            return values[0], values[0], values[0]
        low, middle, high = statistics.quantiles(values, n=4)
        return low, middle, high

    def over(self, variant: str) -> float | None:
        """Return how far a variant's median is above the base's, None without a base."""
        return self.median(variant) - self.median(self.base) if self.base in self.samples else None

    def ratio(self, variant: str) -> float | None:
        """Return a variant's median relative to the base's, None without a base."""
        base = self.median(self.base) if self.base in self.samples else 0.0
        return self.median(variant) / base if base else None

    @property
    def heading(self) -> str:
        """The title with the unit; a ratio has none."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def text(self) -> str:
        """Return the table as a benchmark prints it: median, range, number of samples, and the ratio to the base."""
        head = f"to {self.base}" if self.base else ""
        lines = [f"\n{self.heading:<40}{'median':>10}{'range':>18}{'n':>4}  {head}".rstrip()]
        for variant, values in self.samples.items():
            row = f"{variant:<40}{figure(self.median(variant)):>10}{self.range(variant):>18}{len(values):>4}"
            lines.append(f"{row}  {comparison(self, variant)}".rstrip())
        lines += [f"{variant:<40}  {reason}" for variant, reason in self.missing.items()]
        return "\n".join(lines)


def comparison(table: Table, variant: str) -> str:
    """Return how a variant compares with the base: the ratio, and for seconds the difference too."""
    ratio, over = table.ratio(variant), table.over(variant)
    if ratio is None or over is None or variant == table.base:
        return ""
    return figure(ratio) + (f" ({over:+.3f} s)" if table.unit == "s" else "")


def figure(value: float) -> str:
    """Return a figure with about three digits."""
    size = abs(value)
    return (
        f"{value:,.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 1
        else f"{value:.3f}"
    )
