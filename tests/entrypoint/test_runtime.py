"""Allocator and OpenMP runtime: what is chosen, with which variables, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from entrypoint.errors import Exit, Refused
from entrypoint.libraries import Library
from entrypoint.runtime import Runtime, decide_runtime
from entrypoint.settings import read_launch_settings
from tests.entrypoint.test_planner import machine

ALL = tuple(Library(name, f"/lib/{name}.so", "found") for name in ("tcmalloc", "jemalloc", "intel"))
NONE = tuple(Library(name, None, "not in /lib; a package has it") for name in ("tcmalloc", "jemalloc", "intel"))


def decide(
    environ: Mapping[str, str],
    libraries: tuple[Library, ...] = ALL,
    vendor: str = "GenuineIntel",
    own_preload: str = "",
    waits: bool = False,
) -> Runtime:
    node = replace(machine(2), libraries=libraries, cpu_vendor=vendor)
    return decide_runtime(read_launch_settings(environ, {}), node, own_preload, waits)


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
def test_what_is_preloaded(
    environ: dict[str, str], libraries: tuple[Library, ...], vendor: str, preload: list[str]
) -> None:
    made = decide(environ, libraries, vendor)
    assert [path.removeprefix("/lib/").removesuffix(".so") for path in made.preload] == preload
    assert all(decision.why for decision in made.decisions)


@pytest.mark.parametrize("setting", ["LAUNCH_ALLOCATOR=tcmalloc", "LAUNCH_ALLOCATOR=jemalloc", "LAUNCH_OPENMP=intel"])
def test_asked_for_and_absent_is_an_error_that_says_what_to_install(setting: str) -> None:
    name, value = setting.split("=")
    with pytest.raises(Refused, match=f"{setting}: not in /lib; a package has it, or set {name}=auto") as error:
        decide({name: value}, NONE)
    assert error.value.code == Exit.MACHINE


def test_each_runtime_gets_its_own_variables_and_never_the_others() -> None:
    assert decide({"LAUNCH_OPENMP": "intel"}, waits=True).environment == {"KMP_BLOCKTIME": "0"}
    assert decide({"LAUNCH_OPENMP": "gnu"}, waits=True).environment == {"OMP_WAIT_POLICY": "passive"}
    assert decide({"LAUNCH_OPENMP": "intel"}).environment == {}
    assert set(decide({"LAUNCH_ALLOCATOR": "jemalloc"}).environment) == {"MALLOC_CONF"}


@pytest.mark.parametrize(
    ("own", "what", "value"),
    [("/opt/libtcmalloc.so.4", "allocator", "libtcmalloc.so.4"), ("/opt/libiomp5.so:/x.so", "openmp", "intel")],
)
def test_what_a_person_preloads_is_kept_and_not_preloaded_twice(own: str, what: str, value: str) -> None:
    made = decide({}, own_preload=own)
    decision = next(decision for decision in made.decisions if decision.what == what)
    assert (decision.value, decision.why) == (value, f"(yours) LD_PRELOAD={own}")
    assert not any(path.endswith(f"{value}.so") for path in made.preload)


@pytest.mark.parametrize(
    ("environ", "own"),
    [
        ({"LAUNCH_ALLOCATOR": "jemalloc"}, "/opt/libtcmalloc.so.4"),
        ({"LAUNCH_ALLOCATOR": "system"}, "/opt/libtcmalloc.so.4"),
        ({"LAUNCH_OPENMP": "gnu"}, "/opt/libiomp5.so"),
    ],
)
def test_settings_that_contradict_a_preload_are_refused_naming_both(environ: dict[str, str], own: str) -> None:
    name, value = next(iter(environ.items()))
    with pytest.raises(Refused, match=f"{name}={value} and LD_PRELOAD={own}"):
        decide(environ, own_preload=own)
