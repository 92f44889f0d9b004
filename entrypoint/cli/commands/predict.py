"""`entrypoint predict`: start the program that predicts; it is one process without ranks."""

from __future__ import annotations

from entrypoint.cli.parser import Invocation
from entrypoint.core.errors import UserError
from entrypoint.core.own_modules import module_command
from entrypoint.core.packages import require_extra
from entrypoint.core.process import replace_process
from entrypoint.core.user_dirs import with_fallbacks
from train.predict_settings import read_predict_settings


def run(invocation: Invocation) -> int:
    """Predict the classes of the images that the words name."""
    command, environ = invocation.command, invocation.environ
    flags = {"PREDICT_FORMAT": "json", **command.flags} if command.json else command.flags
    settings = read_predict_settings(environ, flags)
    if len(command.words) < 2:
        raise UserError("predict: needs a trained model and images. Use `entrypoint predict RUN IMAGE ...`.")
    require_extra("train", "predict")
    words = module_command("train.evaluation.predict", *command.words)
    replace_process(words, {**with_fallbacks(environ), **settings.as_variables()})
