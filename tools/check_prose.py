"""Checks the words of documents, settings, reasons and errors: sentence length, and reasons that fit the plan's table.

`python tools/check_prose.py` prints each sentence of more than 25 words, and each literal reason of a decision of more
than 60 characters, with its place; it exits with 1 if there are any. codespell checks the words themselves.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_WORDS = 25
MAX_REASON = 60
ROOT = Path(__file__).resolve().parents[1]
# Calls whose texts a user reads. The argument of a decision that holds its reason, from 0.
ERRORS = ("UserError", "PeerLostError", "Preempted", "CorruptCheckpoint")
REASONS = {"Decision": (2,), "decide": (3, 4), "make_decision": (2, 3)}
FENCE = re.compile(r"^\s*(```|~~~)")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"(*\[])|(?<=[.!?])$|;\s")
# Names, commands and values in backticks count as one word.
CODE = re.compile(r"`[^`]*`")
COMMENT = re.compile(r"<!--.*?-->")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Text:
    """A text and where it stands."""

    place: str
    words: str


def main() -> int:
    """Print what is too long; return 1 if anything is."""
    texts = [*documents(), *settings(), *(text for path in sources() for text in errors(path))]
    long = [
        f"{text.place}: {count} words: {sentence[:100]}"
        for text in texts
        for sentence in sentences(text.words)
        if (count := len(sentence.split())) > MAX_WORDS
    ]
    long += [
        f"{text.place}: a reason of {len(text.words)} characters: {text.words}"
        for path in sources()
        for text in reasons(path)
        if len(text.words) > MAX_REASON
    ]
    print("\n".join(long) if long else f"prose: {len(texts)} texts, no sentence of more than {MAX_WORDS} words")
    return 1 if long else 0


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, code in backticks as one word each."""
    plain = CODE.sub("Code", LINK.sub(r"\1", COMMENT.sub("", text)))
    return [part.strip() for part in SENTENCE_END.split(" ".join(plain.split())) if part.strip()]


def tracked(pattern: str) -> list[Path]:
    """Return the files of this repository that match a pattern, new ones too."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def sources() -> list[Path]:
    """Return the modules of both packages."""
    return [path for path in tracked("*.py") if path.relative_to(ROOT).parts[0] in ("entrypoint", "train")]


def documents() -> Iterator[Text]:
    """Yield each paragraph, list item and table cell of each document."""
    for path in tracked("*.md"):
        if path.name == "settings.md":  # generated from the settings, which are checked themselves
            continue
        fenced = False
        paragraph: list[str] = []
        start = 1
        for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
            if FENCE.match(line):
                fenced = not fenced
                continue
            if fenced or line.startswith("    "):
                continue
            if line.startswith("|"):
                yield from (Text(f"{path.relative_to(ROOT)}:{number}", cell) for cell in line.strip("|").split("|"))
            elif line.strip() and not re.match(r"\s*([-*#>]|\d+\.)\s", line):
                start = number if not paragraph else start
                paragraph.append(line)
                continue
            if paragraph:
                yield Text(f"{path.relative_to(ROOT)}:{start}", " ".join(paragraph))
                paragraph = []
            if re.match(r"\s*([-*#>]|\d+\.)\s", line):
                start, paragraph = number, [re.sub(r"^\s*([-*#>]+|\d+\.)\s", "", line)]


def settings() -> Iterator[Text]:
    """Yield the description of each setting."""
    sys.path.insert(0, str(ROOT))
    from entrypoint.core.settings_base import describe_settings
    from entrypoint.settings import LaunchSettings
    from entrypoint.tune.search import TuneSettings
    from train.predict_settings import PredictSettings
    from train.settings import TrainSettings

    for model in (LaunchSettings, TrainSettings, TuneSettings, PredictSettings):
        yield from (Text(about.variable, about.description) for about in describe_settings(model))


def errors(path: Path) -> Iterator[Text]:
    """Yield the text of each error that a module raises."""
    for call in calls(path):
        texts = call.args[:1] if name_of(call) in ERRORS else []
        if name_of(call) == "refuse_if" and isinstance(call.args[0], ast.Dict):
            texts = [key for key in call.args[0].keys if key]
        for node in texts:
            if text := literal(node):
                yield Text(f"{path.relative_to(ROOT)}:{node.lineno}", text)


def reasons(path: Path) -> Iterator[Text]:
    """Yield each reason of a decision that stands in the source as it is."""
    for call in calls(path):
        for index in REASONS.get(name_of(call), ()):
            if index < len(call.args) and isinstance(call.args[index], ast.Constant):
                text = literal(call.args[index])
                yield Text(f"{path.relative_to(ROOT)}:{call.lineno}", text)


def calls(path: Path) -> Iterator[ast.Call]:
    """Yield every call of a module."""
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    """Return the name of what is called, without what it belongs to."""
    target = call.func
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


def literal(node: ast.expr) -> str:
    """Return a literal text, each inserted value as one word; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return ""


if __name__ == "__main__":
    sys.exit(main())
