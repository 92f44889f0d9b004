"""Hypothesis strategies: machines and grants that no test machine has."""

from __future__ import annotations

from hypothesis import strategies as st

from entrypoint.job.detect import Job
from entrypoint.machine.cpu_topology import Cpu
from entrypoint.machine.detect import Machine

KINDS = st.sampled_from(["auto", "performance", "physical", "logical"])


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Any symmetric, hybrid or ragged machine: siblings either way, nodes with gaps, a mask, a quota."""
    sockets, cores, threads = draw(st.integers(1, 4)), draw(st.integers(1, 16)), draw(st.integers(1, 4))
    per_socket, stride = draw(st.integers(1, 4)), draw(st.sampled_from([1, 8]))
    interleaved, slow = draw(st.booleans()), draw(st.integers(0, 8))
    total = sockets * cores
    cpus = [
        Cpu(
            core + thread * total if interleaved else core * threads + thread,
            core % cores,
            core // cores,
            stride * (core // cores * per_socket + core % cores * per_socket // cores),
            core % cores < slow,
        )
        for thread in range(threads)
        for core in range(total)
    ]
    mask = draw(st.sets(st.sampled_from(cpus), min_size=1))
    quota = draw(st.none() | st.floats(0.1, 200))
    allowed = tuple(sorted(mask, key=lambda cpu: cpu.id))
    return Machine("m", "cpu", "vendor", allowed, len(cpus), quota, 1 << 33)


grants = st.builds(Job, granted_cpus=st.none() | st.integers(1, 300))
