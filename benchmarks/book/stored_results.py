"""Results of earlier runs, stored in a file next to the report, so that `make book` can be resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.book.experiments import EXPERIMENTS, Experiment
from benchmarks.book.measure import Measured


class StoredResults:
    """The experiments of one file; results of other conditions (machine, versions, epochs, rounds) are ignored."""

    def __init__(self, file: Path, conditions: Sequence[str]) -> None:
        self.file, self.conditions = file, list(conditions)
        self.experiments: dict[str, dict[str, Measured]] = {}
        if file.exists():
            content = json.loads(file.read_text())
            if content["conditions"] == self.conditions:
                self.experiments = {
                    title: {name: Measured(**one) for name, one in seen.items()}
                    for title, seen in content["experiments"].items()
                }
            else:
                print(f"{file}: measured under other conditions ({'; '.join(content['conditions'])}), started again")

    def is_missing(self, experiment: Experiment) -> bool:
        """Return whether an experiment has no results yet."""
        names = {variant.name for variant in experiment.variants}
        return set(self.experiments.get(experiment.title, ())) != names

    def results(self, experiment: Experiment) -> Mapping[str, Measured]:
        """Return the results of an experiment's variants."""
        return self.experiments[experiment.title]

    def runs(self) -> list[tuple[Mapping[str, str], Measured]]:
        """Return the settings and results of every measured variant."""
        return [
            (variant.settings, self.experiments[one.title][variant.name])
            for one in EXPERIMENTS
            for variant in one.variants
            if variant.name in self.experiments.get(one.title, ())
        ]

    def add(self, experiment: Experiment, seen: Mapping[str, Measured]) -> None:
        """Add an experiment, also to the file."""
        self.experiments[experiment.title] = dict(seen)
        plain = {title: {name: asdict(m) for name, m in seen.items()} for title, seen in self.experiments.items()}
        self.file.write_text(json.dumps({"conditions": self.conditions, "experiments": plain}, indent=1))
