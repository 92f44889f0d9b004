"""Allocator and OpenMP runtime: what is chosen, with which variables, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode
from entrypoint.machine.shared_libraries import Library
from entrypoint.plan.runtime_libraries import RuntimeLibraries, choose_runtime
from tests.conftest import Entrypoint, refusal, script
from tests.factories import make_machine, plan_inputs

ALL = tuple(Library(name, f"/lib/{name}.so", "found") for name in ("tcmalloc", "jemalloc", "intel"))
NONE = tuple(Library(name, None, "not in /lib; a package has it") for name in ("tcmalloc", "jemalloc", "intel"))


def decide(
    environ: Mapping[str, str],
    libraries: tuple[Library, ...] = ALL,
    vendor: str = "GenuineIntel",
    own_preload: str = "",
    waits: bool = False,
) -> RuntimeLibraries:
    node = replace(make_machine(2), libraries=libraries, cpu_vendor=vendor)
    return choose_runtime(plan_inputs(node, {**environ, "LD_PRELOAD": own_preload}), spinning_is_costly=waits)


def variables(made: RuntimeLibraries) -> dict[str, str]:
    return {name: value for name, (value, _) in made.environment.items()}


@pytest.mark.parametrize(
    ("environ", "libraries", "vendor", "preload"),
    [
        ({}, ALL, "GenuineIntel", ["intel", "tcmalloc"]),
        ({}, ALL, "AuthenticAMD", ["tcmalloc"]),
        ({"LAUNCH_ALLOCATOR": "system"}, ALL, "GenuineIntel", ["intel"]),
        ({}, NONE, "GenuineIntel", []),
        ({"LAUNCH_OPENMP": "gnu"}, ALL, "GenuineIntel", ["tcmalloc"]),
        ({"LAUNCH_OPENMP": "intel"}, ALL, "AuthenticAMD", ["intel", "tcmalloc"]),
        ({"LAUNCH_ALLOCATOR": "tcmalloc"}, ALL, "AuthenticAMD", ["tcmalloc"]),
        ({"LAUNCH_ALLOCATOR": "jemalloc", "LAUNCH_OPENMP": "gnu"}, ALL, "GenuineIntel", ["jemalloc"]),
    ],
)
def test_runtime_libraries_preload(
    environ: dict[str, str], libraries: tuple[Library, ...], vendor: str, preload: list[str]
) -> None:
    made = decide(environ, libraries, vendor)
    assert [path.removeprefix("/lib/").removesuffix(".so") for path in made.preload] == preload
    assert all(decision.text for decision in made.decisions)


@pytest.mark.parametrize("setting", ["LAUNCH_ALLOCATOR=tcmalloc", "LAUNCH_ALLOCATOR=jemalloc", "LAUNCH_OPENMP=intel"])
def test_requested_absent_library_raises_with_what_to_install(setting: str) -> None:
    name, value = setting.split("=")
    refusal(
        decide,
        {name: value},
        NONE,
        match=f"{setting}: not in /lib; a package has it, or set {name}=auto",
        code=ExitCode.MACHINE,
    )


@pytest.mark.parametrize(
    ("environ", "waits", "expected"),
    [
        ({"LAUNCH_OPENMP": "intel"}, True, {"KMP_BLOCKTIME": "0", "KMP_USE_YIELD": "2"}),
        ({"LAUNCH_OPENMP": "intel"}, False, {"KMP_BLOCKTIME": "150us", "KMP_USE_YIELD": "2"}),
        ({"LAUNCH_OPENMP": "intel", "OMP_WAIT_POLICY": "passive"}, False, {}),
        ({"LAUNCH_OPENMP": "gnu"}, True, {"OMP_WAIT_POLICY": "passive"}),
        ({"LAUNCH_OPENMP": "gnu"}, False, {"GOMP_SPINCOUNT": "10000"}),
        ({"LAUNCH_OPENMP": "gnu", "OMP_WAIT_POLICY": "active"}, False, {}),
        (
            {"LAUNCH_OPENMP": "intel", "LAUNCH_CPU_BINDING": "threads"},
            False,
            {
                "KMP_BLOCKTIME": "150us",
                "KMP_USE_YIELD": "2",
                "KMP_AFFINITY": "granularity=fine,compact,1,0",
            },
        ),
        (
            {"LAUNCH_OPENMP": "gnu", "LAUNCH_CPU_BINDING": "threads"},
            False,
            {"GOMP_SPINCOUNT": "10000", "OMP_PLACES": "cores", "OMP_PROC_BIND": "close"},
        ),
    ],
)
def test_each_openmp_runtime_gets_only_its_own_variables(
    environ: dict[str, str], waits: bool, expected: dict[str, str]
) -> None:
    made = decide(environ | {"LAUNCH_ALLOCATOR": "tcmalloc"}, waits=waits)
    assert variables(made) == {"OMP_SCHEDULE": "static", **expected}


def test_jemalloc_sets_malloc_conf() -> None:
    assert "MALLOC_CONF" in variables(decide({"LAUNCH_ALLOCATOR": "jemalloc"}))
    assert "MALLOC_CONF" not in variables(decide({"LAUNCH_ALLOCATOR": "tcmalloc"}))


@pytest.mark.parametrize(
    ("environ", "libraries", "kept"),
    [
        ({}, NONE, True),
        ({"LAUNCH_ALLOCATOR": "system"}, ALL, True),
        ({}, ALL, False),
        ({"LAUNCH_ALLOCATOR": "jemalloc"}, ALL, False),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, NONE, False),
    ],
)
def test_glibc_keeps_memory_unless_set_by_user(
    environ: dict[str, str], libraries: tuple[Library, ...], kept: bool
) -> None:
    made = decide(environ, libraries)
    assert ("GLIBC_TUNABLES" in variables(made)) == kept
    for name, value in environ.items():
        assert any(f"(set by you) {name}={value}" in decision.text for decision in made.decisions)


FAULTS = """
import resource, torch
for step in range(30):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(3 << 20) + torch.ones(12 << 20)[::4]
print("pages", (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""


@pytest.mark.versions
@pytest.mark.launch
@pytest.mark.parametrize(("own", "least", "most"), [("", 0, 99), ("glibc.malloc.check=0", 9999, 99999)])
def test_memory_is_kept_between_steps_unless_set_by_user(
    entrypoint: Entrypoint, own: str, least: int, most: int
) -> None:
    steps = script(entrypoint.folder, "steps.py", FAULTS)
    result = entrypoint.succeed("run", "--verbose", steps, env={"LAUNCH_ALLOCATOR": "system", "GLIBC_TUNABLES": own})
    assert least <= int(result.out.split()[1]) <= most
    reported = f"(set by you) GLIBC_TUNABLES={own}" if own else "keep freed memory"
    assert reported in result.err


def test_contradicting_thread_binding_raises() -> None:
    refusal(
        decide,
        {"LAUNCH_CPU_BINDING": "threads", "KMP_AFFINITY": "disabled"},
        match="LAUNCH_CPU_BINDING=threads and KMP_AFFINITY=disabled both pin threads",
    )


def test_variable_not_read_by_the_active_runtime_is_named() -> None:
    reported = "KMP_AFFINITY=compact has no effect: only Intel's OpenMP runtime reads it."
    assert decide({"LAUNCH_OPENMP": "gnu", "KMP_AFFINITY": "compact"}).warnings[0].startswith(reported)
    assert decide({"LAUNCH_OPENMP": "intel", "KMP_AFFINITY": "compact"}).warnings == ()


@pytest.mark.parametrize(
    ("own", "what", "value"),
    [("/opt/libtcmalloc.so.4", "allocator", "libtcmalloc.so.4"), ("/opt/libiomp5.so:/x.so", "openmp", "intel")],
)
def test_user_preload_is_kept_once(own: str, what: str, value: str) -> None:
    made = decide({}, own_preload=own)
    decision = next(decision for decision in made.decisions if decision.key == what)
    assert (decision.value, decision.text) == (value, f"(set by you) LD_PRELOAD={own}")
    assert not any(path.endswith(f"{value}.so") for path in made.preload)


@pytest.mark.parametrize(
    ("environ", "own"),
    [
        ({"LAUNCH_ALLOCATOR": "jemalloc"}, "/opt/libtcmalloc.so.4"),
        ({"LAUNCH_ALLOCATOR": "system"}, "/opt/libtcmalloc.so.4"),
        ({"LAUNCH_OPENMP": "gnu"}, "/opt/libiomp5.so"),
    ],
)
def test_setting_against_user_preload_raises(environ: dict[str, str], own: str) -> None:
    name, value = next(iter(environ.items()))
    refusal(decide, environ, own_preload=own, match=f"{name}={value} and LD_PRELOAD={own}")


@pytest.mark.versions
@pytest.mark.launch
def test_intel_openmp_accepts_planned_variables_without_warning(entrypoint: Entrypoint) -> None:
    asks = script(entrypoint.folder, "asks.py", "import torch\ntorch.ones(300, 300) @ torch.ones(300, 300)\n")
    result = entrypoint("run", asks, env={"LAUNCH_OPENMP": "intel", "LAUNCH_QUIET": "1", "KMP_SETTINGS": "1"})
    if result.code == ExitCode.MACHINE:
        pytest.skip(f"needs Intel's OpenMP runtime: {result.err}")
    assert result.code == 0, result.err
    _, _, effective = (result.out + result.err).partition("Effective settings")
    assert {"KMP_BLOCKTIME=150us", "KMP_USE_YIELD=2"} <= {line.strip() for line in effective.splitlines()}
    assert "OMP: Warning" not in result.out + result.err
