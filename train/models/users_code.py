"""Code of the user's, by its import path; without torch."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from entrypoint.core.errors import UserError, did_you_mean, first_line, printable


def describe_failure(error: BaseException) -> str:
    """Return what the user's code raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    cause = first_line(error)
    text = f"{type(error).__name__}: {cause}" if cause else type(error).__name__
    return f"raised {printable(text)}{printable(where)}"


# Names that a user's module may have too. Theirs is imported under another one.
OUR_PACKAGES = ("train", "entrypoint", "reference_training")


def import_users_module(name: str, folder: Path | None) -> Any:
    """Import a module of the user's: from `folder`, or installed, or on PYTHONPATH, or in the working folder."""
    if folder is not None:
        folders = [str(folder.absolute())]
        sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders)]
    else:  # a rank's own path has neither
        folders = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(Path.cwd())]
        sys.path += [entry for entry in folders if entry not in sys.path]
    top, _, rest = name.partition(".")
    spec = PathFinder.find_spec(top, folders) if top in OUR_PACKAGES else None
    if spec is None or spec.origin is None or spec.loader is None:
        return importlib.import_module(name)
    alias = f"users_{top}"
    parts = spec.submodule_search_locations
    renamed = spec_from_file_location(alias, spec.origin, submodule_search_locations=parts and list(parts))
    assert renamed is not None, "it has been found"
    assert renamed.loader is not None, "it has been found"
    sys.modules[alias] = module_from_spec(renamed)
    renamed.loader.exec_module(sys.modules[alias])
    return importlib.import_module(f"{alias}.{rest}") if rest else sys.modules[alias]


def import_factory(name: str, folder: Path | None, variable: str = "TRAIN_MODEL") -> Callable[..., Any]:
    """Return the callable at an import path; raises `UserError` for one that cannot be imported.

    `variable` is the one that names it.
    """
    source = f"{variable}={printable(name)}"
    module_name, _, path = name.partition(":")
    if folder is not None and not folder.is_dir():
        raise UserError(f"TRAIN_MODEL_PATH={printable(folder)}: no such folder. Name the one that has the module.")
    try:
        found: Any = import_users_module(module_name, folder)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        own = module_name == missing or module_name.startswith(f"{missing}.")
        where = f" or in TRAIN_MODEL_PATH={printable(folder)}" if folder else ""
        what = f"no module {printable(missing)} is installed{where}" if own else f"needs {printable(missing)}"
        to_do = "Set TRAIN_MODEL_PATH to its folder" if own else "Install it"
        raise UserError(f"{source}: {what}. {to_do}.") from None
    except BaseException as error:  # a module runs any code when it is imported, and may even exit
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"{source}: its module {describe_failure(error)}. Correct it.") from None
    for part in path.split("."):
        owner, found = found, getattr(found, part, None)
        if found is None:
            known = [one for one in dir(owner) if callable(getattr(owner, one, None)) and not one.startswith("_")]
            raise UserError(
                f"{source}: no {printable(part)} in {printable(module_name)}."
                f" {did_you_mean(part, known)}Name a function of it."
            )
    if not callable(found):
        raise UserError(f"{source}: cannot be called. Name a function.")
    return found  # type: ignore[no-any-return]
