"""The trainer's settings: the TRAIN_* variables."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from msgspec import field
from msgspec.structs import replace

from entrypoint.core.errors import UserError, printable
from entrypoint.core.setting_types import as_url
from entrypoint.core.settings_base import ParsedSettings, Settings, read_settings, rules_of
from entrypoint.core.user_dirs import user_cache_dir
from train.setting_groups.compute import ComputeSettings
from train.setting_groups.data import DataSettings, kind_of_folder
from train.setting_groups.network import NetworkSettings
from train.setting_groups.optimization import OptimizationSettings
from train.setting_groups.run import RunSettings

# Channels, height and width.
ImageShape = tuple[int, int, int]
# Steps before a profile: caches fill, kernels are chosen, graphs are compiled.
PROFILE_WARM_UP = 5
# The book's pipeline crops its 224 pixels from images of this side.
BOOK_PIXELS = 255
# Images per evaluation step of a rank, on auto, where they are decoded as they are needed.
STREAM_EVAL_BATCH_SIZE = 256


# A file system takes 255, and a run writes files whose names are a little longer.
MAX_NAME_BYTES = 200


class TrainSettings(Settings, frozen=True, kw_only=True):
    """The trainer's settings by subject, each a variable TRAIN_<NAME> and a flag --<name>."""

    PREFIX: ClassVar[str] = "TRAIN_"

    network: NetworkSettings = field(default_factory=NetworkSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimizationSettings = field(default_factory=OptimizationSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def to_json(self) -> dict[str, Any]:
        """Return the values of all settings as JSON types; the whole path of the data holds in any working folder."""
        values, folder = super().to_json(), self.data.data_dir
        return values if folder is None or as_url(folder) else {**values, "data_dir": str(folder.absolute())}

    def speed_relevant(self) -> dict[str, Any]:
        """Return the settings that change the time of a step, as JSON types."""
        rules = rules_of(type(self))
        return {name: value for name, value in self.to_json().items() if rules[name].speed}


def copy_folder(url: str, environ: Mapping[str, str]) -> Path:
    """Return the folder on this machine for copies of what is below a URL; raises `UserError` without a home."""
    cache = user_cache_dir(environ)
    if cache is None:
        raise UserError(f"{printable(url)}: its copy needs a cache folder. Set HOME or XDG_CACHE_HOME.")
    return cache / "runs" / hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()


def read_train_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> ParsedSettings[TrainSettings]:
    """Validate TRAIN_* and the trainer's flags; raises `UserError`."""
    parsed = read_settings(TrainSettings, environ, flags)
    if (length := len(os.fsencode(parsed.values.run.run_name or ""))) > MAX_NAME_BYTES:
        source = printable(parsed.sources["run_name"])
        raise UserError(f"{source}: is {length} bytes long, and a folder's name has at most {MAX_NAME_BYTES}.")
    is_settled = "dataset" in parsed.sources or not parsed.values.data.data_dir
    # The error of imagefolder says what a folder needs.
    kind = parsed.values.data.dataset if is_settled else kind_of_folder(parsed.values.data.data_dir) or "imagefolder"
    output = copy_folder(url, environ) if (url := parsed.url("output_dir")) else parsed.values.run.output_dir
    return replace(parsed, values=parsed.values.with_values(dataset=kind, output_dir=output))
