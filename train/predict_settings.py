"""The settings of `entrypoint predict`: the PREDICT_* variables, and some of the trainer's."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from entrypoint.core.setting_types import Positive, about
from entrypoint.core.settings_base import Auto, Settings


class PredictSettings(Settings, frozen=True, kw_only=True):
    """The settings of `predict`, each a flag --<name> and a variable PREDICT_<NAME>, or that of the trainer."""

    PREFIX: ClassVar[str] = "PREDICT_"
    OF_TRAINER: ClassVar[tuple[str, ...]] = ("eval_batch_size", "test_time_augment", "model", "model_path")

    format: Annotated[
        Literal["table", "csv", "json"], about("What is printed: a table, CSV, or a JSON list.", basic=True)
    ] = "table"
    top: Annotated[
        Positive,
        about("Most likely classes of each image; of several labels at least all that it has.", basic=True),
    ] = 1
    eval_batch_size: Annotated[Auto | Positive, about("Images in a forward pass. auto: 64.", basic=True)] = "auto"
    test_time_augment: Annotated[
        Literal["auto", "off", "flip", "flip-shift"],
        about("Test-time augmentation: the mean over copies of an image. auto: as the run was evaluated.", basic=True),
    ] = "auto"
    features: Annotated[
        Path | None,
        about("Also write what the last layer gets of each image, as a .npy file with a row for each.", basic=True),
    ] = None
    model: Annotated[
        str, about("Your own model's package.module:function, which a file alone may not choose.", basic=True)
    ] = ""
    model_path: Annotated[Path | None, about("Folder of your own model's module.", basic=True)] = None
