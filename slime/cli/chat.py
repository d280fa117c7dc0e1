"""``slime chat``: talks to a model in the terminal, behind a URL or in a directory."""

import argparse
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from slime.cli.chat_engine import served
from slime.cli.chat_model import MAX_TOKENS, ChatFailed, ChatModel
from slime.utils.terminal import escaped

_INDENT = " " * 7


@dataclass(frozen=True)
class Command:
    """A line that is not for the model; ``act`` returns what is printed."""

    about: str
    act: Callable[[ChatModel, str], str]


def _reset(model: ChatModel, text: str) -> str:
    model.reset()
    return "What was said is forgotten."


def _system(model: ChatModel, text: str) -> str:
    if not text:
        return f"The model is told first: {model.system or '(nothing)'}"
    model.system = text
    return _reset(model, text)


COMMANDS = {
    "/help": Command("these lines", lambda model, text: page()),
    "/reset": Command("forgets what was said", _reset),
    "/system": Command("TEXT: tells the model this first, and forgets the rest", _system),
}
_LEAVING = ("/exit", "/quit")


def page() -> str:
    """What may be typed."""
    rows = {
        **{name: command.about for name, command in COMMANDS.items()},
        "/exit": "leaves, as /quit and Ctrl-D do",
        "Ctrl-C": "stops an answer, or drops the line that is typed",
        "\\": "at the end of a line: it goes on in the next one",
    }
    return "\n".join(f"  {name:<8} {about}" for name, about in rows.items())


def run(words: Sequence[str]) -> int:
    """Reads lines and prints answers, until the input ends."""
    args = _parser().parse_args(words)
    try:
        key = _key(args.key_variable)
        with served(args.model) as url:
            limit = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
            _talk(ChatModel(url, key, args.system, {"temperature": args.temperature, **limit}))
    except (ChatFailed, OSError) as error:
        print(f"error: {args.model}: {harmless(str(error))}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "slime chat",
        description=__doc__,
        epilog=f"in the conversation:\n{page()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", help="http://HOST:PORT of an engine or a router, or a checkpoint's directory"
    )
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1; 0 is greedy")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help=f"of an answer (default: {MAX_TOKENS}, but of a small context a quarter)",
    )
    parser.add_argument(
        "--key-variable", metavar="NAME", help="variable of the environment with the server's key"
    )
    return parser


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise ChatFailed(f"--key-variable {variable}: not set (wanted: export {variable}=KEY)")
    return key


def _talk(model: ChatModel) -> None:
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # a Python without it reads plain lines
            import readline  # noqa: F401  # lets lines be edited, and earlier ones come back
    print(f"{harmless(model.name)} at {model.url}; /help says what may be typed, Ctrl-D leaves.")
    while (line := _next_line(typed)) is not None:
        name, _, rest = line.partition(" ")
        if name in COMMANDS:
            print(harmless(COMMANDS[name].act(model, rest.strip())))
        elif typed and name.startswith("/") and name[1:].isalpha():
            print(f"{name} is no command: /help has them.")
        elif line:
            _show(model, line, typed)


def _next_line(typed: bool) -> str | None:
    """What is typed, without space at its ends; None where that is all."""
    print()
    try:
        line = input("you    ")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{input(_INDENT)}"
    except EOFError:
        print(flush=True)  # the prompt's line has no end yet
        return None
    except KeyboardInterrupt:
        if not typed:
            raise
        print("\n(Ctrl-D leaves)")
        return ""
    line = line.strip()
    return None if line in _LEAVING else line


def _show(model: ChatModel, line: str, typed: bool) -> None:
    """Prints an answer as it comes; in a terminal a failure is told, and the conversation goes on."""
    print("model  ", end="", flush=True)
    try:
        print(_printed(model.answer(line)), flush=True)
    except ChatFailed as error:
        print(flush=True)
        if not typed:
            raise
        print(f"error: {harmless(str(error))}", flush=True)


def _printed(answer: Generator[str, None, str]) -> str:
    """Prints the pieces, further lines below the first one; returns what is to be said of the end."""
    with closing(answer):
        try:
            while True:
                print(harmless(next(answer)).replace("\n", f"\n{_INDENT}"), end="", flush=True)
        except StopIteration as end:
            return str(end.value)
        except KeyboardInterrupt:
            return " (stopped)"


def harmless(text: str) -> str:
    """The text without what could control the terminal: such characters are shown by their codes."""
    return escaped(text, kept="\n")
