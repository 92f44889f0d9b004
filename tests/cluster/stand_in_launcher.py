"""Stands in for launchers that cannot be had here: sets their documented variables and starts each rank by ssh.

stand_in_launcher.py KIND [options of that launcher] COMMAND…, with SSH_CONFIG and STAND_IN_HOSTS in the environment.
STAND_IN_HOSTS is node1,node2, or node1:2,node2:1 with the ranks on each; then no option is needed.
The sources of the variables are those of tests/entrypoint/job/documented.json.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

# For each launcher the options whose product is the number of ranks, those that a value follows, and a rank's
# variables.
COUNT = {"PALS": ("-n",), "jsrun": ("-n",), "Flux": ("--nodes", "--tasks-per-node")}
WITH_VALUE = {"PALS": {"-n", "--ppn", "--cpu-bind"}, "jsrun": {"-n", "-a", "-c"}, "Flux": {"-o"}}


def variables(kind: str, rank: int, place: tuple[int, int, int], total: int, hosts: int) -> dict[str, str]:
    """Return what the launcher puts into the environment of one rank; `place` is its host, local rank, local size."""
    node, local, each = place
    return {
        "PALS": {
            "PALS_RANKID": str(rank),
            "PALS_NODEID": str(node),
            "PALS_LOCAL_RANKID": str(local),
            "PALS_LOCAL_SIZE": str(each),
            "PALS_APID": "1a2b",
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(total),
            "PMI_LOCAL_RANK": str(local),
            "PMI_LOCAL_SIZE": str(each),
        },
        "jsrun": {
            "JSM_NAMESPACE_RANK": str(rank),
            "JSM_NAMESPACE_SIZE": str(total),
            "JSM_NAMESPACE_LOCAL_RANK": str(local),
            "JSM_NAMESPACE_LOCAL_SIZE": str(each),
            "PMIX_RANK": str(rank),
        },
        "Flux": {
            "FLUX_JOB_ID": "f1",
            "FLUX_JOB_NNODES": str(hosts),
            "FLUX_JOB_SIZE": str(total),
            "FLUX_TASK_RANK": str(rank),
            "FLUX_TASK_LOCAL_ID": str(local),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(total),
        },
    }[kind]


def main(kind: str, words: list[str]) -> int:
    """Start the ranks, wait for them, and return the first code that is not 0."""
    if words == ["--version"]:
        print({"PALS": "mpiexec (PALS) 1.3.4"}.get(kind, kind))
        return 0
    asked = 1
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        value = value or (words.pop(0) if name in WITH_VALUE[kind] else "")
        asked *= int(value) if name in COUNT[kind] else 1
    hosts = [name.partition(":") for name in os.environ["STAND_IN_HOSTS"].split(",")]
    each, more = divmod(asked, len(hosts))  # the first hosts get one rank more
    sizes = [int(count or each + (node < more)) for node, (_, _, count) in enumerate(hosts)]
    total = sum(sizes)
    ranks = []
    places = [(node, local, size) for node, size in enumerate(sizes) for local in range(size)]
    for rank, place in enumerate(places):
        environ = {**os.environ, **variables(kind, rank, place, total, len(hosts))}
        given = [f"{name}={value}" for name, value in environ.items() if not name.startswith("BASH_FUNC")]
        line = shlex.join(["cd", os.getcwd()]) + " && exec env -i " + shlex.join([*given, *words])  # noqa: PTH109
        ranks.append(subprocess.Popen(["ssh", "-F", os.environ["SSH_CONFIG"], hosts[place[0]][0], line]))
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
