"""`entrypoint predict` and `export`: start the program that uses a trained model; it is one process without ranks."""

from __future__ import annotations

from entrypoint.cli.parser import Invocation
from entrypoint.core.errors import UserError, printable, refuse_if
from entrypoint.core.packages import require_extra
from entrypoint.core.process import module_command, replace_process
from entrypoint.core.settings_base import read_settings
from entrypoint.core.user_dirs import with_fallbacks
from train.planning.export_formats import FORMATS, check_formats
from train.predict_settings import PredictSettings

# Of the settings of `predict`, those that an export takes too: which code builds the model.
MODEL_CODE = ("TRAIN_MODEL", "TRAIN_MODEL_PATH")


def run(invocation: Invocation) -> int:
    """Predict the classes of the images that the words name, or export the model as the formats that they name."""
    command, environ, name = invocation.command, invocation.environ, invocation.command.command
    flags = {"PREDICT_FORMAT": "json", **command.flags} if command.json else command.flags
    settings = read_settings(PredictSettings, environ, flags)
    wanted, usage = ("images", "IMAGE ...") if name == "predict" else ("formats", "|".join(FORMATS))
    form = settings.values.format
    refuse_if(
        {
            f"{name}: needs a trained model and {wanted}. Use `entrypoint {name} RUN {usage}`.": len(command.words) < 2,
            f"--json and --format={form} contradict. Leave one out.": command.json and form != "json",
        }
    )
    source, *others = command.words
    if name == "export":
        for variable in flags.keys() - MODEL_CODE:
            raise UserError(f"{variable}={printable(flags[variable])}: has no effect on an export. Leave it out.")
        check_formats(others, "export")
    require_extra("train", name)
    from train.checkpoint.store import local_run

    source = local_run(source, environ)
    program = {"predict": "train.evaluation.predict", "export": "train.evaluation.exports"}[name]
    replace_process(module_command(program, source, *others), {**with_fallbacks(environ), **settings.as_variables()})
