"""The documents: short, current, with links that lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.runner import read_runs
from entrypoint.machine.shared_libraries import Library
from entrypoint.plan.display import Layout, plan_lines
from entrypoint.plan.model import Program
from tests.factories import make_test_plan, simulated_machine
from tools import benchmarks_docs, check_prose, figures, settings_docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900


def test_change_notes_are_one_page() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.split()) <= 500
    headings = re.findall(r"^#.*", text, re.MULTILINE)
    assert len(headings) == len(set(headings)), "a section a version"


def test_plan_in_readme_is_what_the_entrypoint_prints() -> None:
    machine = replace(
        simulated_machine("2-socket EPYC 7742"),
        hostname="node1",
        cpu_model="AMD EPYC 7742",
        memory_bytes=512 << 30,
        libraries=(Library("tcmalloc", "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", ""),),
    )
    plan = make_test_plan(machine, program=Program("script", ("python", "train.py")))
    lines = [f"    {line}" for line in plan_lines(plan, Layout(verbose=False))]
    text = (ROOT / "README.md").read_text()
    shown = text.split("The plan of a node with two sockets:\n\n")[1].split("\n\n")[0]
    assert shown.splitlines() == lines, "put these lines into README.md"


def test_every_function_of_the_followed_run_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text().split("## Follow one run")[1].split("\n## ")[0]
    steps = re.findall(r"`([\w/]+\.py):(\w+)`", text)
    assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == 12
    for file, function in steps:
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, (file, function)


def test_every_path_in_the_architecture_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(r"`((?:entrypoint|train|containers)/[\w./]+)", text)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_threat_has_a_test_or_is_open() -> None:
    rows = re.findall(r"^\| (?:a|an|another|the) .*\|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert ("**open**" in row) != bool(named), row
        assert all(f"def {name}(" in tests for name in named), row


def test_index_names_every_page_of_docs() -> None:
    text = (ROOT / "docs/README.md").read_text()
    assert [
        page.name for page in ROOT.glob("docs/*.md") if page.name != "README.md" and f"({page.name})" not in text
    ] == []


def test_page_of_benchmarks_is_short() -> None:
    assert len(benchmarks_docs.PAGE.read_text().split()) <= 2000


def test_generated_pages_are_current() -> None:
    assert settings_docs.PAGE.read_text() == settings_docs.page(), "run `make docs`"
    assert benchmarks_docs.PAGE.read_text() == benchmarks_docs.page(), "run `make docs`"
    for page in figures.marked_pages():
        assert page.read_text() == figures.with_figures(page.read_text(), read_runs()), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_commands_of_readme_exist() -> None:
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {target for rule in rules for target in rule.split()}
    for page in PAGES:
        for target in re.findall(r"`?make ([a-z][a-z-]+)", page.read_text()):
            assert target in known, (page.name, target)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One fact. Another one.", 2),
        ("It costs 0.1 s and more", 1),
        ("`a b c` works: Use it; then go", 3),
    ],
)
def test_sentences_are_split_at_their_ends(text: str, count: int) -> None:
    assert len(check_prose.sentences(text)) == count


def test_long_sentence_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("word " * 26 + "\n")
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    monkeypatch.setattr(check_prose, "tracked", lambda pattern: [tmp_path / "page.md"] if pattern == "*.md" else [])
    assert check_prose.main() == 1
    assert "page.md:1: 26 words" in capsys.readouterr().out


def test_names_of_tests_are_short() -> None:
    tests = [name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert [name for name in tests if len(name) > 60] == []


def test_benchmarks_import_nothing_from_tests() -> None:
    sources = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tools/*.py")]
    assert [path for path in sources if re.search(r"^(from|import) tests\b", path.read_text(), re.MULTILINE)] == []


def test_no_test_module_is_imported() -> None:
    imports = re.compile(r"^(from|import) tests\.(\w+\.)*test_", re.MULTILINE)
    assert [path for path in ROOT.glob("tests/**/*.py") if imports.search(path.read_text())] == []


def test_error_classes_of_the_prose_check_exist() -> None:
    classes = {
        name for path in check_prose.sources() for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }
    assert set(check_prose.ERRORS) <= classes
