"""Finds what could run code of a stranger's choice: pickles, object collectives, eval, and the like.

Each exception stands in `ALLOWED` with its reason, and one that is no longer needed is an error too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("entrypoint", "train", "containers", "tools")
# Names of modules and functions; one of a library's is enough, however it was imported.
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "np.load",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.broadcast_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
}
METHODS = {name.rpartition(".")[2] for name in CALLS if name.startswith("dist.")}
SHELL = "shell=True"
ALLOWED = {
    ("train/models/state_dict_file.py", "pickle"): "its unpickler knows the functions that build tensors, and no other",
    ("train/data/cache/image_cache.py", "np.load"): "with allow_pickle=False",
}


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if one.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called.rpartition(".")[2] in METHODS:
                yield node.lineno, called
            if any(word.arg == "shell" and ast.unparse(word.value) != "False" for word in node.keywords):
                yield node.lineno, SHELL


def main() -> int:
    """Print each use that is not allowed, and each exception that nothing needs; return how many."""
    used: set[tuple[str, str]] = set()
    wrong = 0
    for path in sorted(path for folder in FOLDERS for path in Path(folder).rglob("*.py")):
        for line, name in findings(ast.parse(path.read_text())):
            used.add((str(path), name))
            if (str(path), name) not in ALLOWED:
                wrong += 1
                print(f"{path}:{line}: {name} may run code of a file's or a rank's choice")
    for path_name, name in sorted(ALLOWED.keys() - used):
        wrong += 1
        print(f"tools/check_trust.py: {name} in {path_name} is allowed, and not there")
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
