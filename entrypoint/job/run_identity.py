"""What distinguishes a run from others on the same nodes: the launcher's id for it, else what the run computes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from entrypoint.core.errors import one_line
from entrypoint.job.detect import Job
from entrypoint.job.launchers import Family
from entrypoint.job.node_group import JOB_TOKEN_VAR
from entrypoint.machine.procfs import ROOT, ancestors, command_words

# Begins an identity that another run may have too.
PROGRAM = "program "
# The trainer's settings that are the same on all nodes of a run.
COMMON_SETTINGS = ("RECIPE", "MODEL", "DATASET", "EPOCHS", "BATCH_SIZE", "LR", "SEED")
MAX_TEXT = 200


def identify_run(job: Job, environ: Mapping[str, str], words: Sequence[str]) -> str:
    """Return the identity of a run, the same on all its nodes; `words` say what it computes.

    Without an id of a launcher it begins with `PROGRAM`, and runs of the same words have the same identity.
    """
    token = environ.get(JOB_TOKEN_VAR) or ("" if job.family == Family.BATCH_ID else job.job_id)
    if token:
        return token
    text = one_line(" ".join(words))
    digest = zlib.crc32("\0".join((job.job_id, *words)).encode("utf-8", "surrogateescape"))
    return f"{PROGRAM}{text[:MAX_TEXT]} ({digest:08x})"


def train_words(environ: Mapping[str, str], flags: Mapping[str, str]) -> Iterator[str]:
    """Yield what a run of the trainer computes: its settings that are the same on all nodes."""
    yield "train"
    for name in COMMON_SETTINGS:
        value = flags.get(f"TRAIN_{name}") or environ.get(f"TRAIN_{name}")
        if value:
            yield f"TRAIN_{name}={value}"


def with_run_id(job: Job) -> Job:
    """Return the job with the id of a run that hydra started: the address at which its mpiexec listens.

    Hydra gives a run no id. The command line of its proxy on any node has the address, unless /proc hides the proxy
    (another PID namespace, Intel MPI).
    """
    for process in ancestors(ROOT) if job.family == Family.HYDRA and not job.job_id else ():
        words = command_words(process)
        if "--control-port" in words[:-1] and "hydra_pmi_proxy" in words[0]:
            return replace(job, job_id=words[words.index("--control-port") + 1])
    return job


def has_monitor(job: Job, environ: Mapping[str, str], identity: str) -> bool:
    """Return whether a parent of each rank watches the others; `identity` distinguishes this run from others.

    On one node torchrun's agent does that itself. Ranks that are started there by hand need a MASTER_PORT of their own:
    else two runs of one command could meet, and ranks of one run may have different words.
    """
    if not job.launcher or job.world_size == 1:
        return False
    if not job.on_one_node:
        return True
    is_known = bool(environ.get("MASTER_PORT")) or not identity.startswith(PROGRAM)
    return is_known and not environ.get("TORCHELASTIC_RUN_ID")
