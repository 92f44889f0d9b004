"""`entrypoint completion`: commands, flags and values in bash and zsh, by `eval "$(entrypoint completion bash)"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrypoint.cli.command_table import COMMANDS, SWITCHES, all_groups
from entrypoint.cli.invocation import Invocation
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.settings_base import Settings, describe_settings

SHELLS = ("bash", "zsh")
SCRIPT = """_entrypoint() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} values=
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then values="{commands}"
  else
    case $before in
{cases}
    esac
    case $word in -*) values="{flags}" ;; esac
  fi
  [ -z "$values" ] || COMPREPLY=($(compgen -W "$values" -- "$word"))
}}
complete -o default -F _entrypoint entrypoint"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def run(invocation: Invocation) -> int:
    """Print the script of a shell."""
    write_stdout(completion_script(invocation.command.words, all_groups()))
    return ExitCode.DONE


def completion_script(words: Sequence[str], groups: Mapping[str, type[Settings]]) -> str:
    """Return the script of a shell; raises `UserError` for a shell that is not known.

    Files are completed where no flag or value fits.
    """
    if len(words) != 1 or words[0] not in SHELLS:
        given = f" {printable(words[0])}" if words else ""
        raise UserError(f"completion{given}: needs the name of a shell. Use one of: {', '.join(SHELLS)}.")
    fields = [about for model in groups.values() for about in describe_settings(model)]
    flags = sorted(
        {*(about.flag for about in fields), *(f"--{name}" for name in SWITCHES), "--config", "--help", "--help-all"}
    )
    cases = "\n".join(f'      {about.flag}) values="{" ".join(about.choices)}" ;;' for about in fields if about.choices)
    script = SCRIPT.format(commands=" ".join(COMMANDS), flags=" ".join(flags), cases=cases)
    return (ZSH if words[0] == "zsh" else "") + script
