"""`entrypoint tune`: try plans for the program and keep the fastest."""

from __future__ import annotations

from msgspec.structs import replace

from entrypoint.cli.build_plan import build_plan, settings_affecting_speed
from entrypoint.cli.parser import Invocation
from entrypoint.cli.plan_inputs import read_plan_inputs
from entrypoint.core.process import resume_gc
from entrypoint.core.settings_base import read_settings
from entrypoint.tune.search import TuneSettings, tune


def run(invocation: Invocation) -> int:
    """Try plans, whatever other processes do."""
    command, inputs = invocation.command, read_plan_inputs(invocation, counts_load=False)
    resume_gc()
    settings = read_settings(TuneSettings, inputs.environ, command.flags).values
    training = settings_affecting_speed(command, inputs)
    plan = build_plan(command, inputs)
    inputs = replace(inputs, environ={**inputs.environ, **command.flags})
    return tune(inputs, plan, settings, training, command.program_words)
