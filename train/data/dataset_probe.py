"""Program that looks at a data set of the user's: `train.data.dataset_info` starts it, as plans import no such code."""

from __future__ import annotations

import msgspec

from entrypoint.core.errors import UserError, one_line
from train.checkpoint.metadata import saved_settings
from train.child import answer
from train.data.dataset_info import DatasetInfo, describe_lists
from train.data.sources.own_dataset import list_own_splits


def report(question: bytes) -> DatasetInfo:
    """Return the facts of the data set that settings name, or why it cannot be used."""
    settings = saved_settings(msgspec.json.decode(question))
    try:
        return describe_lists(settings, *list_own_splits(settings, only_test=settings.run.tests_only))
    except UserError as error:
        return DatasetInfo(0, (0, 0, 0), problem=one_line(error))


if __name__ == "__main__":
    answer(report)
