"""Profile the four phases of a step with PyTorch's profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from entrypoint.core.files import atomic_write_text
from train.settings import PROFILE_WARM_UP

DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES = ("data", "forward and loss", "backward", "optimizer")
RECORD_PREFIX = "step: "
ROWS = 25

Phase = Callable[[str], AbstractContextManager[object]]


def no_phase(_: str) -> AbstractContextManager[object]:
    """Mark nothing, for runs without a profile."""
    return nullcontext()


@contextmanager
def profiled_phase(name: str, device: torch.device) -> Iterator[None]:
    """Mark a phase in the profile; synchronizes a GPU at its end, so that its work counts in this phase."""
    with record_function(f"{RECORD_PREFIX}{name}"):
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Profiler:
    """Profile some steps of one rank after a warm-up, and write the results into the run folder."""

    def __init__(self, steps: int, folder: Path, device: torch.device, say: Callable[[str], None]) -> None:
        self.steps, self.folder, self.log = steps, folder / "profile", say
        self.device = device
        self.done = 0
        self.running: profile | None = None

    def stop_incomplete(self) -> str:
        """Stop a profile that the end of the run cut short; return why there is none."""
        if self.running:
            self.running.stop()
        return (
            f"warning: TRAIN_PROFILE={self.steps} wrote no profile: it needs {PROFILE_WARM_UP + self.steps} steps, and"
            f" {self.done} were left"
        )

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark a phase while the profile runs; the first mark of a step starts it."""
        if name == DATA and self.done == PROFILE_WARM_UP and not self.running:
            cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self.running = profile(activities=[ProfilerActivity.CPU, *cuda])
            self.running.start()
        return profiled_phase(name, self.device) if self.running else nullcontext()

    def step(self) -> bool:
        """Count a step; return whether the profile is complete and written."""
        self.done += 1
        if self.done < PROFILE_WARM_UP + self.steps or not self.running:
            return False
        self.running.stop()
        self.write(self.running)
        return True

    def write(self, seen: profile) -> None:
        """Write the operators by their own time, the phases, and a trace for chrome://tracing or Perfetto."""
        self.folder.mkdir(exist_ok=True)
        events = seen.key_averages()
        marked = {event.key: event.cpu_time_total / 1e6 for event in events}
        seconds = {name: marked.get(f"{RECORD_PREFIX}{name}", 0.0) for name in PHASES}
        shares = {name: round(seconds[name] / max(1e-9, sum(seconds.values())), 4) for name in PHASES}
        orders = ("self_cpu_time_total", *(["self_device_time_total"] if self.device.type == "cuda" else []))
        tables = (events.table(sort_by=by, row_limit=ROWS, max_name_column_width=60) for by in orders)
        atomic_write_text(self.folder / "operators.txt", "\n".join(tables))
        phases = {"steps": self.steps, "seconds": seconds, "shares": shares}
        atomic_write_text(self.folder / "phases.json", json.dumps(phases, indent=2) + "\n")
        seen.export_chrome_trace(str(self.folder / "trace.json"))
        parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
        self.log(f"profile of {self.steps} steps: {parts}; {self.folder}")
