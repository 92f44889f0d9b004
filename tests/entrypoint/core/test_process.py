"""What Python costs a process with torch: none looks for garbage in an import, nor tears all down at the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import import_module

import pytest

from entrypoint.core.process import gc_paused

pytestmark = pytest.mark.launch

CODE = """
import gc
from entrypoint.core.process import gc_paused

looked = []
gc.callbacks.append(lambda phase, _: looked.append(phase))
with gc_paused():
    import torch
print(len(looked), gc.isenabled(), gc.get_freeze_count())
"""


def test_gc_paused_import_torch_collects_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    looked, enabled, frozen = done.stdout.split()
    assert (looked, enabled) == ("0", "True")
    assert int(frozen) > 100_000


def test_gc_paused_import_fails_enables_gc() -> None:
    with pytest.raises(ImportError), gc_paused():
        import_module("entrypoint.nonesuch")
    assert gc.isenabled()
    gc.unfreeze()


END = """
import atexit, sys
from entrypoint.core.process import fast_exit

class Torn:
    def __del__(self):
        print("torn down")

torn = Torn()
atexit.register(print, "registered")
print("said")
fast_exit(0)
"""


@pytest.mark.parametrize("code", [0, 75])
def test_fast_exit_runs_atexit_skips_shutdown(code: int) -> None:
    words = END.replace("fast_exit(0)", f"fast_exit({code})")
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (code, ["said", "registered", ""])


def test_fast_exit_broken_pipe_exits_as_python() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", END], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 120
    assert "BrokenPipeError" in done.stderr


BESIDE_PEERS = """
import sys
from entrypoint.core import exit_delay, process

sys.modules["torch"], exit_delay.EXIT_DELAY_S = None, 60
process.fast_exit(0)
"""


def test_fast_exit_skips_exit_delay() -> None:
    environ = {**os.environ, "WORLD_SIZE": "2"}
    subprocess.run([sys.executable, "-c", BESIDE_PEERS], env=environ, check=True, timeout=30)


def test_fast_exit_failure_waits_for_threads() -> None:
    code = "import threading as t, time\nfrom entrypoint.core.process import fast_exit\n"
    code += "t.Thread(target=lambda: (time.sleep(1), print('written'))).start()\nfast_exit(7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "written\n")
    pool = code.replace("t.Thread(target=", "ThreadPoolExecutor().submit(").replace(").start()", ")")
    pool = f"from concurrent.futures import ThreadPoolExecutor\n{pool}"
    done = subprocess.run([sys.executable, "-c", pool], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (7, "written\n"), "and for a pool, whose idle threads end"
