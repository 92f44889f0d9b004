"""`python -m reference_training`, which is what the command `entrypoint` starts."""

import os
import runpy

from reference_training.own import OWN

if __name__ == "__main__":
    runpy.run_path(os.path.join(OWN, "entrypoint", "__main__.py"), run_name="__main__")  # noqa: PTH118
