"""Where this project's packages are: in a folder of its own in a wheel, next to this one in a checkout."""

import os

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs a start 5 ms
OWN = os.path.join(HERE, "_own") if os.path.isdir(os.path.join(HERE, "_own")) else os.path.dirname(HERE)  # noqa: PTH112, PTH118, PTH120
