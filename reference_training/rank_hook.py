"""Prepares a rank's interpreter: `reference_training.pth` imports this where the entrypoint has started the process."""

import importlib.util
import os
import sys

from reference_training.own import OWN

FILE = os.path.join(OWN, "entrypoint", "core", "exit_delay.py")  # noqa: PTH118 - pathlib costs a start 5 ms
spec = importlib.util.spec_from_file_location("reference_training.exit_delay", FILE)
if spec and spec.loader:
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
