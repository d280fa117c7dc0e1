"""Compiles grammars, in a process of its own: ``python -m [this module] SECONDS``.

xgrammar may take hours or all memory, or overflow its stack, over a few kilobytes from a client; then this
process ends, and not the engine. The first line of its input describes the tokenizer, each further one is a
grammar as JSON, ``[kind, text]``; each is answered with a line, ``{"compiled": ...}`` or ``{"error": ...}``.
"""

import json
import re
import resource
import signal
import sys
from typing import Any

import xgrammar

_BYTES = 4 * 2**30
_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")
"""Time of day and source line, with which xgrammar's messages begin."""


def main() -> None:
    seconds = int(sys.argv[1])
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _BYTES if most == resource.RLIM_INFINITY else min(_BYTES, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
    for line in sys.stdin:
        kind, text = json.loads(line)
        # The signal's default action ends the process, wherever that is: no Python code has to run for it.
        # Time of the processor, as on a busy machine a small grammar may wait long.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(compiler, kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _answer(compiler: xgrammar.GrammarCompiler, kind: str, text: str) -> dict[str, str]:
    try:
        return {"compiled": _compiled(compiler, kind, text).serialize_json()}
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {"error": _PLACE.sub("", str(error)).strip() or repr(error)}


def _compiled(compiler: xgrammar.GrammarCompiler, kind: str, text: str) -> xgrammar.CompiledGrammar:
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "ebnf":
        return compiler.compile_grammar(text)
    if kind == "structural_tag":
        return compiler.compile_structural_tag(_structural_tag(json.loads(text)))
    if text == "$$ANY$$":
        return compiler.compile_builtin_json_grammar()
    return compiler.compile_json_schema(text)


def _structural_tag(tag: dict[str, Any]) -> Any:
    """A tag of ``structures`` and ``triggers``, which is the older form, or one with a ``format``."""
    if tag.get("structures") is None:
        if tag.get("format") is None:
            raise ValueError("wanted structures and triggers, or a format")
        _fill_in_schemas(tag["format"])
        return json.dumps(tag)
    items = [
        xgrammar.StructuralTagItem(
            begin=part["begin"], schema=json.dumps(part.get("schema") or {}), end=part["end"]
        )
        for part in tag["structures"]
    ]
    made = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
    form: Any = made.format
    form.at_least_one = tag.get("at_least_one", False)
    return made


def _fill_in_schemas(part: Any) -> None:
    """A format without its schema takes any JSON."""
    if not isinstance(part, dict):
        return
    if part.get("type") in ("json_schema", "qwen_xml_parameter") and part.get("json_schema") is None:
        part["json_schema"] = {}
    for inner in (part.get("content"), *(part.get("elements") or ()), *(part.get("tags") or ())):
        _fill_in_schemas(inner)


if __name__ == "__main__":
    main()
