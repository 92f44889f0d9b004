"""The settings of `entrypoint predict`: the PREDICT_* variables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from entrypoint.core.settings_base import ParsedSettings, Settings, read_settings
from train.setting_groups.value_types import Positive


class PredictSettings(Settings, frozen=True, kw_only=True):
    """The settings of `predict`, each a variable PREDICT_<NAME> and a flag --<name>."""

    PREFIX: ClassVar[str] = "PREDICT_"
    BASIC: ClassVar[tuple[str, ...]] = ("format", "top", "batch_size", "test_time_augment", "model", "model_path")

    format: Annotated[
        Literal["table", "csv", "json"], Meta(description="What is printed: a table, CSV, or a JSON list.")
    ] = "table"
    top: Annotated[Positive, Meta(description="Most likely classes of each image.")] = 1
    batch_size: Annotated[Positive, Meta(description="Images in a forward pass.")] = 64
    test_time_augment: Annotated[
        Literal["auto", "off", "flip", "flip-shift"],
        Meta(description="Test-time augmentation: the mean over copies of an image. auto: as the run was evaluated."),
    ] = "auto"
    model: Annotated[
        str, Meta(description="Your own model's package.module:function, which a file alone may not choose.")
    ] = ""
    model_path: Annotated[Path | None, Meta(description="Folder of your own model's module.")] = None


def read_predict_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> ParsedSettings[PredictSettings]:
    """Validate PREDICT_* and the flags of `predict`; raises `UserError`."""
    return read_settings(PredictSettings, environ, flags)
