"""Starts the entrypoint: `python -m entrypoint`.

Only modules that Python has loaded before are imported here, until `sys.path` is in order.
"""

import gc
import os
import sys


def reorder_path() -> None:
    """Put Python's own folders and this project before the user's, which are this folder and those of PYTHONPATH.

    A json.py or a train.py of the user must not be imported instead. This process only plans, so the user's program is
    not affected. The user's folders stay last, because they may have nbformat. This project comes before the installed
    packages, and after the standard library, of which each module would be looked up here first.
    """
    version = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    first = next((index for index, entry in enumerate(sys.path) if entry.endswith(version)), 0)
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  # pathlib is not loaded
    ours = sys.path[first:]
    installed = next((index for index, entry in enumerate(ours) if entry.endswith("-packages")), len(ours))
    sys.path[:] = [*ours[:installed], project, *ours[installed:], *sys.path[:first]]


reorder_path()


def import_msgspec() -> None:
    """Import msgspec without typing_extensions, a large module that msgspec imports where it is installed.

    Python's own typing has had what msgspec needs since 3.11. Nothing else is kept from importing typing_extensions.
    """
    if "typing_extensions" in sys.modules:
        return
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]  # documented: the import fails
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]


def run_module() -> int:
    """Run one of this project's modules as a program (`core.process`); it ends the process with its own code."""
    import runpy

    _, _, module, *words = sys.argv
    sys.argv = [module, *words]
    gc.enable()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def main() -> int:
    """Run the command line and return the exit code; a rank's own start imports no more than it needs.

    Garbage is not collected until `resume_gc`: nearly all objects of a start stay, and would be scanned repeatedly.
    """
    gc.disable()
    import_msgspec()
    from entrypoint.core.console import open_standard_streams

    open_standard_streams()
    if sys.argv[1:2] == ["--module"]:
        return run_module()
    if sys.argv[1:] == ["rank"]:
        from entrypoint.cli.rank_command import main as run
    else:
        from entrypoint.cli.main import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
