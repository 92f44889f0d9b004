"""Checks that the code stays small: `make check` runs it, and `python tools/check_size.py --list` prints all counts.

The statements of entrypoint/ and train/ have a ceiling, and so have the lines of a function. Local names that say
nothing of what they hold may only become fewer: MAX_VAGUE is what there is, to be lowered with each change.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("entrypoint", "train")
MAX_STATEMENTS = 21_000
MAX_FUNCTION_LINES = 60
MAX_VAGUE = {"one": 12, "found": 67, "given": 54, "own": 54}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> int:
    """Print what is too large; return 1 if anything is."""
    trees = {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    statements = Counter({path: count_statements(tree) for path, tree in trees.items()})
    vague = sum((vague_names(tree) for tree in trees.values()), Counter())
    problems = [place for path, tree in trees.items() for place in long_functions(path, tree)]
    if statements.total() > MAX_STATEMENTS:
        problems.append(f"{statements.total():,} statements in {' and '.join(PACKAGES)}: at most {MAX_STATEMENTS:,}")
    problems += [
        f"{vague[name]} local names `{name}`: at most {limit}. Say what it holds."
        for name, limit in MAX_VAGUE.items()
        if vague[name] > limit
    ]
    if "--list" in sys.argv[1:]:
        folders: Counter[Path] = Counter()
        for path, count in statements.items():
            folders[path.parent] += count
        print("\n".join(f"{count:6,}  {folder}" for folder, count in sorted(folders.items())))
        print(", ".join(f"{name} {vague[name]}" for name in MAX_VAGUE))
    print("\n".join(problems) if problems else f"size: {statements.total():,} statements in {len(trees)} modules")
    return 1 if problems else 0


def count_statements(tree: ast.AST) -> int:
    """Return the number of statements."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def long_functions(path: Path, tree: ast.AST) -> list[str]:
    """Return each function that does not fit on a screen, with its place."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    lines = {node: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    return [
        f"{path}:{node.lineno}: {node.name} has {count} lines, at most {MAX_FUNCTION_LINES}"
        for node, count in lines.items()
        if count > MAX_FUNCTION_LINES
    ]


def vague_names(tree: ast.AST) -> Counter[str]:
    """Return how often each vague name is that of a value or a parameter, outside of comprehensions."""
    inside = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, COMPREHENSIONS)
        for target in outer.generators
        for node in ast.walk(target.target)
    }
    nodes = list(ast.walk(tree))
    names = [node.id for node in nodes if isinstance(node, ast.Name) and is_stored(node) and id(node) not in inside]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return Counter(name for name in names if name in MAX_VAGUE)


def is_stored(name: ast.Name) -> bool:
    """Return whether a value is assigned to a name here."""
    return isinstance(name.ctx, ast.Store)


if __name__ == "__main__":
    sys.exit(main())
