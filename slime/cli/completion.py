"""``slime completion``: the script by which a shell completes commands and flags.

eval "$(slime completion bash)"           # in ~/.bashrc; zsh likewise in ~/.zshrc
slime completion fish | source            # in config.fish
"""

import argparse
from collections.abc import Mapping, Sequence

_TRAINS = ("train", "check", "resume")
"""Commands that take the flags of a run."""

_BASH = """\
_slime() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "{commands}" -- "$word")
    elif [[ "$word" == -* && " {trains} " == *" ${{COMP_WORDS[1]}} "* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "{flags}" -- "$word")
    elif [[ "${{COMP_WORDS[COMP_CWORD - 1]}}" == --form ]]; then
        mapfile -t COMPREPLY < <(compgen -W "{forms}" -- "$word")
    fi
}}
complete -o default -o bashdefault -F _slime slime
"""
_ZSH = """\
_slime() {{
    if ((CURRENT == 2)); then
        compadd -- {commands}
    elif [[ "$PREFIX" == -* && " {trains} " == *" $words[2] "* ]]; then
        compadd -- {flags}
    elif [[ "$words[CURRENT-1]" == --form ]]; then
        compadd -- {forms}
    else
        _files
    fi
}}
compdef _slime slime
"""


def run(words: Sequence[str]) -> int:
    """Prints the script for a shell."""
    parser = argparse.ArgumentParser(
        "slime completion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    print(script(parser.parse_args(words).shell), end="")
    return 0


def script(shell: str) -> str:
    """What the shell is to read: commands and flags stand in it, so that completing starts no Python."""
    from slime.arguments.core.parser import build_parser
    from slime.cli.main import COMMANDS
    from slime.cli.new_task import FORMS

    abouts = {name: command.about for name, command in COMMANDS.items()}
    parser, _ = build_parser("embedded")
    flags = sorted({name for action in parser._actions for name in action.option_strings if name[:2] == "--"})
    if shell == "fish":
        return _fish(abouts, ["--async", *flags])
    words = {"commands": abouts, "trains": _TRAINS, "flags": ["--async", *flags], "forms": FORMS}
    return (_BASH if shell == "bash" else _ZSH).format(**{name: " ".join(w) for name, w in words.items()})


def _fish(abouts: Mapping[str, str], flags: Sequence[str]) -> str:
    lines = [
        f"complete -c slime -n __fish_use_subcommand -a {name} -d '{about}'" for name, about in abouts.items()
    ]
    taking = " ".join(_TRAINS)
    lines += [f"complete -c slime -n '__fish_seen_subcommand_from {taking}' -l {flag[2:]}" for flag in flags]
    return "\n".join([*lines, ""])
