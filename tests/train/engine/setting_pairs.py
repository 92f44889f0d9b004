"""Trains a few steps with each combination of settings that it is given, in this process, and says how each ended.

`python pairs.py FOLDER` reads the combinations from standard input, a JSON list of environments; each of several ranks
does the same. It is a program of its own, so that ranks meet only once and nothing is imported again for each.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from entrypoint.cli.build_plan import build_plan
from entrypoint.cli.parser import CommandLine
from entrypoint.cli.plan_inputs import detect_plan_inputs
from entrypoint.core.errors import UserError
from entrypoint.job.detect import Job
from entrypoint.settings import read_launch_settings
from train.engine.trainer import train
from train.settings import read_train_settings


def ended(environ: dict[str, str]) -> str:
    """Train; return nothing where that went well, else the refusal, or the traceback of what is no refusal."""
    try:
        command = CommandLine(command="train")
        inputs = detect_plan_inputs(command, read_launch_settings(environ, {}), Job(), environ)
        plan = build_plan(command, inputs)
        train(read_train_settings(environ, {}), plan, time.time())
    except UserError as error:
        return f"refused: {error}"
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    """Write a line of JSON for each combination."""
    folder = Path(sys.argv[1])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the agent's store is good for one meeting
    for index, one in enumerate(json.loads((folder / "combinations.json").read_text())):
        os.environ["MASTER_PORT"] = str(int(sys.argv[2]) + index)
        said = ended({"TRAIN_OUTPUT_DIR": str(folder / f"runs{index}"), **one})
        if os.environ["RANK"] == "0":
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
