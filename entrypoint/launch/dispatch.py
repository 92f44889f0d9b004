"""Start the plan's launcher: local child processes, torchrun, mpirun or srun, or this process as a rank."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

from entrypoint.core.packages import require_extra
from entrypoint.core.process import PREEMPTION, replace_process, resume_gc
from entrypoint.job.detect import Job
from entrypoint.job.job_key import JOB_KEY_VAR
from entrypoint.job.node_group import START_TIME_VAR
from entrypoint.plan.key_decision import DRAWN_HERE
from entrypoint.plan.model import PLAN_VAR, Plan
from entrypoint.rank.bootstrap import exec_program
from entrypoint.rank.environment import AGENT_ONLY_VARS

# Launchers whose ranks make their own plan on each node.
REMOTE_LAUNCHERS = ("mpirun", "srun")


def launch(plan: Plan, job: Job, environ: Mapping[str, str], started: float) -> NoReturn:
    """Start the ranks, or execute the program in this process if it is already a rank."""
    resume_gc()
    environ = {START_TIME_VAR: str(started), **environ}
    if plan.launcher in REMOTE_LAUNCHERS and plan.rendezvous.key_source == DRAWN_HERE:
        import secrets

        environ = {**environ, JOB_KEY_VAR: secrets.token_hex(32)}  # never on a command line, which all users see
    if plan.launcher == "mpirun":
        from entrypoint.launch import mpirun

        environment = {**environ, **plan.environment.variables}
        saves = plan.trainer is not None and plan.trainer.saves_checkpoints
        sys.exit(mpirun.supervise_mpirun(plan.command, environment, saves=saves, grace_s=plan.grace_period_s))
    if plan.launcher in REMOTE_LAUNCHERS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)  # srun forwards them to the ranks
        replace_process(plan.command, {**environ, **plan.environment.variables})
    if plan.launcher in ("direct", "local"):
        from entrypoint.launch import local

        sys.exit(local.run(plan, job, environ))
    if plan.launcher != "torchrun":
        exec_program(plan, job, environ)
    require_extra("train", "torchrun's agent")
    # The agent's store looks up its own address. Without a DNS server that takes 20 s and prints warnings.
    quiet = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # A new store for each start: the keys of ranks that were killed would cost further restarts, or stall them.
    quiet["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    quiet = {name: value for name, value in quiet.items() if name not in environ}
    environ |= {**quiet, AGENT_ONLY_VARS: ",".join(quiet)}
    replace_process(plan.command, {**environ, **plan.environment.variables, PLAN_VAR: plan.to_json()})
