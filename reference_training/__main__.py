"""`python -m reference_training`, which is what the command `entrypoint` starts."""

import os
import runpy

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs a start 5 ms
# A wheel has the packages in a folder of its own, a checkout next to this one.
OWN = os.path.join(HERE, "_own") if os.path.isdir(os.path.join(HERE, "_own")) else os.path.dirname(HERE)  # noqa: PTH112, PTH118, PTH120

if __name__ == "__main__":
    runpy.run_path(os.path.join(OWN, "entrypoint", "__main__.py"), run_name="__main__")  # noqa: PTH118
