"""The report as one page of HTML with its images inside, and as Markdown."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.book.experiments import Experiment, Variant
from benchmarks.book.measure import Measured, speed_doubt

HEADERS = ("variant", "book: s", "book: x", "book: %", "images/s", "spread", "x", "training s", "first step s", "%")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.6em 0}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}td.why{text-align:left;color:#777}h2{margin-top:2em}.claim{color:#555}
img{max-width:100%}"""


@dataclass(frozen=True)
class Result:
    """An experiment and its results."""

    experiment: Experiment
    seen: Mapping[str, Measured]

    @property
    def there(self) -> dict[str, Measured]:
        """The variants that ran."""
        return {name: one for name, one in self.seen.items() if one.summaries}

    @property
    def conclusion(self) -> str:
        """Whether the book's conclusion holds here."""
        return self.experiment.conclusion(self.there) if self.there else "Not to be seen here: nothing of it runs."


def row(variant: Variant, result: Result) -> tuple[str, ...]:
    """Return a variant's cells; one that did not run has the reason after the book's figures, as its last cell."""
    one = result.seen[variant.name]
    book_base = result.experiment.variants[0].book_seconds
    book = (
        variant.name,
        number(variant.book_seconds, 0),
        number(book_base / variant.book_seconds if book_base and variant.book_seconds else None, 2),
        number(variant.book_accuracy, 2),
    )
    if not one.summaries:
        return (*book, one.refusal)
    base = next(iter(result.there.values()))
    doubtful = speed_doubt({"base": base, variant.name: one})
    return (
        *book,
        number(one.speed, 0),
        f"{100 * one.spread:.0f} %" if len(one.speeds) > 1 else "–",
        number(None if doubtful else one.speed / base.speed, 2),
        number(one.seconds, 1),
        number(one.first_step, 2),
        number(one.accuracy, 2),
    )


def number(value: float | None, digits: int) -> str:
    """Return a figure, a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"


def as_markdown(results: Sequence[Result], conditions: Sequence[str]) -> str:
    """Return the report as Markdown."""
    lines = ["# The book's experiments, here", "", *(f"- {line}" for line in conditions), ""]
    for result in results:
        experiment = result.experiment
        lines += [f"## {experiment.chapter}: {experiment.title}", "", f"The book: {experiment.claim}", ""]
        lines += [f"| {' | '.join(HEADERS)} |", f"|{'---|' * len(HEADERS)}"]
        for variant in experiment.variants:
            cells = row(variant, result)
            lines.append(f"| {' | '.join((*cells, *[''] * (len(HEADERS) - len(cells))))} |")
        lines += ["", f"**{result.conclusion}**", ""]
    return "\n".join(lines)


def as_html(results: Sequence[Result], conditions: Sequence[str]) -> str:
    """Return the report as a page that needs no other file."""
    parts = [f"<!doctype html><meta charset=utf-8><title>The book's experiments</title><style>{STYLE}</style>"]
    parts.append("<h1>The book's experiments, here</h1><ul>")
    parts += [f"<li>{html.escape(line)}</li>" for line in conditions]
    parts.append("</ul>")
    for result in results:
        experiment = result.experiment
        parts.append(f"<h2>{html.escape(f'{experiment.chapter}: {experiment.title}')}</h2>")
        parts.append(f"<p class=claim>The book: {html.escape(experiment.claim)}</p><table><tr>")
        parts += [f"<th>{html.escape(header)}</th>" for header in HEADERS]
        parts.append("</tr>")
        for variant in experiment.variants:
            name, *cells = (html.escape(cell) for cell in row(variant, result))
            *first, last = (f"<td>{cell}</td>" for cell in cells)
            missing = len(HEADERS) - len(cells)
            if missing > 1:
                last = last.replace("<td>", f"<td class=why colspan={missing}>", 1)
            parts.append(f"<tr><td>{name}</td>{''.join(first)}{last}</tr>")
        parts.append(f"</table><p><b>{html.escape(result.conclusion)}</b></p>")
        if experiment.curve and len(result.there) > 1:
            image = base64.b64encode(draw(result)).decode()
            parts.append(f'<img alt="{html.escape(experiment.title)}" src="data:image/png;base64,{image}">')
    return "\n".join(parts)


def draw(result: Result) -> bytes:
    """Plot the experiment's values over its variants, a dot per run and a line through the medians; return a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    accuracy = result.experiment.curve == "accuracy"
    names = list(result.there)
    figure = Figure(figsize=(6.5, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    runs = [one.values("test_accuracy") if accuracy else one.speeds for one in result.there.values()]
    middle = [one.accuracy if accuracy else one.speed for one in result.there.values()]
    axes.plot(names, middle, "-", lw=1.2, color="#1f6feb")
    for name, values in zip(names, runs, strict=True):
        axes.plot([name] * len(values), values, "o", ms=4, color="#1f6feb", alpha=0.6)
    axes.set_ylim(bottom=0, top=1.15 * max(max(values) for values in runs))
    axes.set_ylabel("test accuracy, %" if accuracy else "images/s")
    axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()
