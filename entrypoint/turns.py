"""Whether ranks ask for turns at a CPU of their own length: threads that wait for each other want short ones."""

from __future__ import annotations

from entrypoint.errors import Exit, Refused
from entrypoint.plan import Decision, Rank
from entrypoint.question import Question

# From this kernel on a process may ask for a time slice of its own: the shorter, the sooner it is let in again after a
# wait, for the same share of the CPU (docs.kernel.org, scheduler/sched-eevdf.rst; kernelnewbies.org/Linux_6.12).
SINCE = (6, 12)
# Measured on two cores, in turns: threads whose every core had a busy neighbour were 1.07 times as fast as with the
# kernel's 1.4 ms, a rank with loader workers on its own cores as fast; with 100 us, the shortest that the kernel grants
# (kernel/sched/syscalls.c), 1.11 and 0.9 times.
SHORT_US = 300
WHY = "threads that wait for each other get in again sooner beside busy neighbours, for the same share of the CPU"


def decide_time_slice(question: Question, ranks: tuple[Rank, ...]) -> tuple[int, tuple[Decision, ...]]:
    """Return the time slice to ask for in microseconds, 0 for the kernel's own; raises `Refused` where it has none.

    Asked for where a rank has several threads: measured, one that computes alone gains nothing.
    """
    asked, kernel = question.settings.values.time_slice_us, question.machine.kernel
    if asked == "auto":
        threads = max(rank.threads for rank in ranks)
        if kernel < SINCE or threads == 1:
            return 0, ()
        return SHORT_US, (Decision("time slice", f"{SHORT_US} us", WHY),)
    why = question.why("time_slice_us", "")
    if asked == "kernel":
        return 0, (Decision("time slice", "the kernel's", why),)
    if kernel < SINCE:
        release = ".".join(str(part) for part in kernel) or "unknown"
        raise Refused(
            f"{question.settings.source['time_slice_us']}: needs Linux {SINCE[0]}.{SINCE[1]}, this one is {release};"
            " unset it",
            Exit.MACHINE,
        )
    return asked, (Decision("time slice", f"{asked} us", why),)
