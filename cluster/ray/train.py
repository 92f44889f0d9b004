"""Train on the nodes of a Ray cluster: `python train.py --nodes 2 --cpus 8 -- train --model resnet18 --epochs 90`.

Ray reserves the nodes, and the entrypoint of each starts its ranks. All print here. For your own script write
`-- run x.py`. The exit code is that of the rank that failed first. After 75, a saved stop, and after a lost node the
job starts again and resumes. `ray.train.report` takes reports from Ray Train's workers alone: progress is in the log.
"""

import argparse
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

MACHINE, RANK_FAILED, PREEMPTED, TERMINATED, LOST = 3, 5, 75, 143, -1
# Nodes see these variables of the command, and nothing else of its environment.
PASSED = re.compile(r"(TRAIN|LAUNCH|OMP|KMP|GOMP|MKL|GLOO|NCCL|CCL|UCX|TORCH)_(?!.*(TOKEN|SECRET|PASSWORD|KEY)$)")


@ray.remote(max_concurrency=2)  # `stop` comes while `run` waits
class Node:
    """What runs on a node, with the resources of one bundle."""

    process: subprocess.Popen[str] | None = None
    stopped = False

    def address(self) -> str:
        """Return the node's address."""
        return ray.util.get_node_ip_address()

    def run(self, command: list[str], given: dict[str, str], folder: str, cpus: int) -> Iterator[str | int]:
        """Run the entrypoint; yield each line that it prints, and its exit code."""
        if self.stopped:
            yield TERMINATED
            return
        by_ray = ("OMP_NUM_THREADS", str(cpus))  # though all ranks of the node share these CPUs
        environ = dict(pair for pair in os.environ.items() if pair != by_ray)
        unused = len(os.sched_getaffinity(0)) - cpus
        if unused > 0:  # Ray counts CPUs and does not say which ones are whose
            environ |= {"LAUNCH_RESERVE_CPUS": str(unused), "LAUNCH_CPU_BINDING": "none"}
        cwd, out, err = folder if Path(folder).is_dir() else None, subprocess.PIPE, subprocess.STDOUT
        self.process = subprocess.Popen(command, env=environ | given, cwd=cwd, stdout=out, stderr=err, errors="replace")
        yield from (line for line in self.process.stdout or ())  # a generator, which Ray asks for
        yield self.process.wait()

    def stop(self) -> None:
        """Let the entrypoint save a checkpoint and end."""
        self.stopped = True
        if self.process:
            self.process.terminate()


def watch(name: str, values: Any) -> tuple[str, int, str]:
    """Print a node's lines; return its name, its exit code, LOST if Ray has lost it, and its last line."""
    code, last = LOST, ""
    try:
        for value in map(ray.get, values):
            if isinstance(value, int):
                code = value
            else:
                print(f"{name}: {value}", end="", flush=True)
                last = value.strip() or last
    except RayTaskError as error:  # the node has no such command
        code, last = MACHINE, str(error.cause)
    except RayError as error:
        last = last or str(error).splitlines()[0]
    return name, code, last


def run_job(asked: argparse.Namespace, environ: dict[str, str], nodes: list[Any]) -> int:
    """Run an entrypoint on each node until all have ended; return the code of the first failure, or LOST."""
    bundle = {"CPU": asked.cpus, "GPU": asked.gpus}
    group = placement_group([bundle] * asked.nodes, strategy="STRICT_SPREAD")
    pool, watched, first, words = ThreadPoolExecutor(asked.nodes), [], 0, asked.command + asked.words
    try:
        if not group.wait(600):
            print(f"train.py: no {asked.nodes} nodes have {bundle} within 600 s", file=sys.stderr)
            return MACHINE
        if asked.stopping:
            return TERMINATED
        for rank in range(asked.nodes):
            place = PlacementGroupSchedulingStrategy(group, rank)
            nodes.append(Node.options(num_cpus=asked.cpus, num_gpus=asked.gpus, scheduling_strategy=place).remote())
        address = ray.get(nodes[0].address.remote())
        port = str(61000 + secrets.randbelow(4000))  # above the ephemeral range
        for rank, node in enumerate(nodes):
            given = environ | {"MASTER_ADDR": address, "MASTER_PORT": port, "LAUNCH_NODE_RANK": str(rank)}
            values = node.run.options(num_returns="streaming").remote(words, given, str(Path.cwd()), asked.cpus)
            watched.append(pool.submit(watch, f"node {rank}", values))
        for done in as_completed(watched):
            name, code, last = done.result()
            if code and first in (0, RANK_FAILED):  # the nodes of the other ranks end with 5
                first = code
                ended = "is lost" if code == LOST else f"ended with {code}"
                print(f"train.py: {name} {ended}: {last}", file=sys.stderr, flush=True)
    finally:
        while nodes:
            ray.kill(nodes.pop())
        remove_placement_group(group)
    return first


def main() -> int:
    """Run the job, again after a saved stop or a lost node; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--cpus", type=int, required=True, help="CPUs of each node")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each node, a rank each (0)")
    parser.add_argument("--restarts", type=int, default=3, help="how often it starts again (3)")
    parser.add_argument("--command", type=shlex.split, default=["entrypoint"], help="on each node (entrypoint)")
    parser.add_argument("words", nargs="+", help="what the entrypoint gets, after --")
    parser.set_defaults(stopping=False)
    asked = parser.parse_args()
    ray.init(address="auto", log_to_driver=False)
    environ = {name: value for name, value in os.environ.items() if value and PASSED.match(name)}
    environ |= {"LAUNCH_NNODES": str(asked.nodes), "ENTRYPOINT_JOB_KEY": secrets.token_urlsafe(32)}
    nodes: list[Any] = []

    def stop(*_: object) -> None:
        if asked.stopping:  # a second signal does not wait
            sys.exit(TERMINATED)
        asked.stopping, asked.restarts = True, 0
        for node in nodes:
            node.stop.remote()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while (code := run_job(asked, environ, nodes)) in (PREEMPTED, LOST) and asked.restarts:
        asked.restarts -= 1
        print(f"train.py: starts again; {asked.restarts} restarts are left", file=sys.stderr, flush=True)
        environ["TRAIN_RESUME"] = "auto"
    return RANK_FAILED if code == LOST else code


if __name__ == "__main__":
    sys.exit(main())
