"""`entrypoint export`: start the program that writes a trained model for other runtimes."""

from __future__ import annotations

from entrypoint.cli.parser import Invocation
from entrypoint.core.errors import UserError, printable
from entrypoint.core.own_modules import module_command
from entrypoint.core.packages import require_extra
from entrypoint.core.process import replace_process
from entrypoint.core.user_dirs import with_fallbacks
from train.planning.export_formats import FORMATS, check_formats
from train.predict_settings import read_predict_settings

# Of the settings of `predict`, those that say which code builds the model.
USED = ("PREDICT_MODEL", "PREDICT_MODEL_PATH")


def run(invocation: Invocation) -> int:
    """Export the run that the words name, as the formats after it."""
    command, environ = invocation.command, invocation.environ
    settings = read_predict_settings(environ, command.flags)
    for variable in command.flags.keys() - USED:
        raise UserError(f"{variable}={printable(command.flags[variable])}: has no effect on an export. Leave it out.")
    if len(command.words) < 2:
        raise UserError(f"export: needs a trained model and formats. Use `entrypoint export RUN {'|'.join(FORMATS)}`.")
    source, *formats = command.words
    require_extra("train", "export")
    words = module_command("train.evaluation.exports", source, *check_formats(formats, "export"))
    replace_process(words, {**with_fallbacks(environ), **settings.as_variables()})
