"""The plan as a person reads it."""

from __future__ import annotations

from entrypoint.plan.display import plan_lines
from tests.factories import make_machine, make_test_plan


def test_every_decision_is_a_line_with_its_reason() -> None:
    made = make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": "2"})
    lines = plan_lines(made)
    assert lines[0] == "plan: node1: a CPU, 4 of 4 CPUs (4 physical cores), 8.0 GiB, no GPU"
    assert lines[1] == "  socket 0 node 0: 0011"
    assert len(lines) == 1 + len(made.map) + len(made.decisions)
    for decision, line in zip(made.decisions, lines[2:], strict=True):
        assert line.split()[0] == decision.what
        assert line.endswith(decision.why)


def test_the_command_is_shown_where_nothing_is_started() -> None:
    lines = plan_lines(make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": "2"}), command=True)
    assert lines[-1] == "  would run: python x.py"
    lines = plan_lines(
        make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_MAX_RESTARTS": "1"}), command=True
    )
    assert "entrypoint.launch.torchrun" in lines[-2]
    assert lines[-1] == "  each rank: python x.py"


def test_warnings_are_shown() -> None:
    assert any(
        "  warning: 9 threads" in line for line in plan_lines(make_test_plan(make_machine(2), {"LAUNCH_THREADS": "9"}))
    )


def test_a_plan_of_a_thousand_cores_stays_short() -> None:
    made = make_test_plan(make_machine(1024), {"LAUNCH_NPROC_PER_NODE": "512"})
    assert max(map(len, plan_lines(made))) < 200
