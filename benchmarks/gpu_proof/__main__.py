"""Everything that only a GPU can show, within one lease of a bare machine: `make gpu-proof`.

A call takes MINUTES (9) at most, never needs a network, and takes the rows of ROWS in the order of their worth.
Each row is a process with a limit of its own. A row that fails does not end the call.
A row whose limit does not fit into the minutes that are left is named as not run; a shorter one may still follow.
The next call on the same machine goes on with the rows that have not run, then with those that failed.
`gpu-proof/` has a JSON line a row in rows.jsonl, a line to read in rows.txt, and what the rows printed in log.txt.
OUT names a folder for copies of the three. --fresh forgets the rows of earlier calls.
Copy this tree and gpu-proof-kit/ to the machine. `make gpu-proof-kit` fills that folder with what a bare machine
lacks: wheels, libjpeg's headers, images. The call installs it there, unless the Python is that of this clone.
Rows on speed alternate their variants on the same card: ours, loops by hand, airbench94 (AIRBENCH94), timm.
--dry-run does a small part of each row on a CPU, with small models of the same kinds. Its figures mean nothing.
No row has run on a GPU at this commit. The loop by hand from memory has, with torch 2.11.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_proof.kit import KIT, ROOT, unpack

if TYPE_CHECKING:
    from benchmarks.gpu_proof.proof import Proof

MINUTES = 9.0
# How many times as long a row may take on a CPU that other processes share.
PATIENCE = 6


def rows() -> dict[str, tuple[float, Callable[[Proof], None]]]:
    """Return each row's limit in seconds and its work, those of the most worth first."""
    from benchmarks.gpu_proof import endings, speed
    from benchmarks.gpu_proof.proof import RESNET, VIT

    return {
        "machine": (40, endings.machine),
        "speedrun": (150, speed.speedrun),
        "resnet50": (180, partial(speed.from_memory, model=RESNET)),
        "cuda-tests": (120, endings.cuda_tests),
        "resnet50-files": (90, partial(speed.from_files, model=RESNET)),
        "precision": (60, partial(speed.precisions, model={"recipe": "speedrun"})),
        "vit-s": (150, partial(speed.from_memory, model=VIT)),
        "two-ranks": (20, endings.two_ranks),
        "out-of-memory": (30, endings.out_of_memory),
        "hang": (40, partial(endings.ranks_that_end, kind="hang", text="is missing from")),
        "killed-rank": (30, partial(endings.ranks_that_end, kind="kill", text="SIGKILL")),
        "running": (30, endings.running),
        "transfer": (20, speed.transfer),
        "fsdp": (75, speed.parallelism),
        "checkpoints": (75, speed.checkpoints),
        "use": (60, endings.use),
        "precision-vit": (120, partial(speed.precisions, model=speed.SMALL_VIT)),
        "vit-s-files": (90, partial(speed.from_files, model=VIT)),
    }


def main() -> None:
    """Run a row, or all that are still to run."""
    parser = argparse.ArgumentParser(prog="make gpu-proof")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call, the last row included")
    parser.add_argument("--dry-run", action="store_true", help="a small part of each row, on a CPU")
    parser.add_argument("--only", nargs="+", default=[], help="names of rows")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier calls")
    parser.add_argument("--folder", type=Path, default=ROOT / "gpu-proof", help="of results and data")
    parser.add_argument("--kit", type=Path, default=KIT, help="folder of `make gpu-proof-kit`")
    parser.add_argument("--row", help="be this row")
    args = parser.parse_args()
    if args.row:
        from benchmarks.gpu_proof.proof import Proof

        data = args.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        rows()[args.row][1](Proof(data.resolve(), dry=args.dry_run))
        return
    for line in unpack(args.kit):
        print(line, flush=True)
    prove(args)


def prove(args: argparse.Namespace) -> None:
    """Run the rows that are still to run, and print what became of them; end with 1 if one failed or did not run."""
    from benchmarks.conditions import read_source, read_versions
    from benchmarks.gpu_proof.board import DONE, FILES, Job, Ledger, run_all
    from entrypoint.machine.gpus import read_gpus

    gpus, driver = read_gpus(Path("/"))
    if not gpus and not args.dry_run:
        sys.exit(f"no NVIDIA GPU: {driver.problem or 'none is visible'}. DRY_RUN=1 tries the rows on a CPU.")
    table = rows()
    if unknown := sorted(set(args.only) - set(table)):
        sys.exit(f"--only: {', '.join(unknown)}: no such row. One of: {', '.join(table)}.")
    for name in FILES if args.fresh else ():
        (args.folder / name).unlink(missing_ok=True)
    card = "dry run on a CPU" if args.dry_run else f"{gpus[0].name}, driver {driver.version}"
    key = f"{card}, torch {read_versions().get('torch', 'none')}, commit {read_source().commit[:7] or 'unknown'}"
    print(key, flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu_proof", f"--folder={args.folder}"]
    command += ["--dry-run"] * args.dry_run
    jobs = [
        Job(name, limit_s * (PATIENCE if args.dry_run else 1), [*command, f"--row={name}"])
        for name, (limit_s, _) in table.items()
        if not args.only or name in args.only
    ]
    out = os.environ.get("OUT")
    states = run_all(jobs, Ledger(args.folder, Path(out) if out else None, key), 60 * args.minutes)
    counts = [states.get(job.name) for job in jobs]
    print(f"{counts.count(DONE)} of {len(jobs)} rows are done; {args.folder}/rows.txt", flush=True)
    sys.exit(counts.count(DONE) < len(jobs))


if __name__ == "__main__":
    main()
