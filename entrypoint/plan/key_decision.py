"""Decides which key the monitors of a job over several nodes have in common."""

from __future__ import annotations

from entrypoint.core.errors import printable
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, Source

# A launcher of this process's own starts the ranks, and passes on the key that this process draws.
DRAWN_HERE = "drawn here"
ONLY_WITH_IT = "hosts without it cannot join; the ranks' data is not encrypted"


def decide_key_source(inputs: PlanInputs) -> tuple[str, str]:
    """Return where the job's key is, and its file; none on one node, where the kernel says whose processes they are."""
    if not spans_nodes(inputs):
        return "none", ""
    source = inputs.key_source
    if inputs.remote_launcher and not inputs.job.launcher and source.kind in ("none", "drawn"):
        return DRAWN_HERE, ""
    return source.kind, source.path


def decide_job_key(inputs: PlanInputs) -> tuple[Decision, ...]:
    """Return who may take part in a job over several nodes."""
    kind, path = decide_key_source(inputs)
    if not spans_nodes(inputs):
        return ()
    if inputs.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return (Decision("job key", "none", f"{inputs.job.launcher}'s own store accepts any host (see SECURITY.md)"),)
    if kind == "file":
        setting = printable(inputs.settings.sources["secret_file"])
        return (
            Decision(
                key="job key", value="LAUNCH_SECRET_FILE", reason=ONLY_WITH_IT, source=Source.USER, setting=setting
            ),
        )
    values = {
        "variable": ("ENTRYPOINT_JOB_KEY", f"drawn for this job; {ONLY_WITH_IT}"),
        DRAWN_HERE: ("drawn", f"this process draws it; {ONLY_WITH_IT}"),
        "drawn": ("drawn", f"rank 0 writes it to {printable(path)}; {ONLY_WITH_IT}"),
        "none": ("none", "any host can join the job. Set LAUNCH_SECRET_FILE"),
    }
    return (Decision("job key", *values[kind]),)


def spans_nodes(inputs: PlanInputs) -> bool:
    """Return whether ranks on several nodes have monitors."""
    job, remote = inputs.job, inputs.remote_launcher
    if job.launcher:
        return not job.on_one_node
    return inputs.node_group.nnodes > 1 or bool(remote and (len(remote.hosts) > 1 or len(job.hostnames) > 1))


def warn_of_one_node(inputs: PlanInputs) -> tuple[str, ...]:
    """Return a warning for each setting that has no effect because the job has one node."""
    values, sources = inputs.settings.values, inputs.settings.sources
    unused = {
        f"{printable(sources.get('secret_file'))} has no effect: the job has one node": values.secret_file,
        f"{sources.get('collective_timeout_s')} has no effect: on one node a script sets its own limits": (
            values.collective_timeout_s != "auto" and inputs.program.kind != "train"
        ),
    }
    return () if spans_nodes(inputs) else tuple(text for text, holds in unused.items() if holds)
