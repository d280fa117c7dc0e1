"""Bad inputs, generated over every flag, every file that is read and every plug-in point.

What is generated is a list of changes to a good command line, each with the name that its refusal must hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from slime.arguments.core.flag import Flag, flags_of, without_none
from slime.arguments.core.values import has_range
from slime.arguments.registry import derived_names, documented_groups
from slime.config.evaluation import EvalDatasetConfig
from tests.arguments.test_supported_flags import words_for_another_value
from tools.generate_flag_docs import is_refused

SPECS = [spec for group in documented_groups() for spec in group.flags]
OPEN = [spec for spec in SPECS if not is_refused(spec)]


@dataclass(frozen=True)
class BadInput:
    """One change to a good command line.

    Attributes:
        flag: the flag or field whose test it is a case of.
        about: what it is, for the line that says it does not hold.
        said: what the refusal must begin with.
        named: what else it must name.
        words: to add to the command line; ``{site}`` is a directory of the test's own.
        flags: to change in it, as ``words`` of the fixture takes them; ``{site}`` likewise.
        files: to write into the directory of the test's own, by name.
    """

    flag: str
    about: str
    said: str
    named: str = ""
    words: tuple[str, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def value_type(spec: Flag) -> Any:
    """The type of a flag's value, or of each of its values."""
    base, _ = without_none(spec.type)
    return get_args(base)[0] if get_origin(base) is list else base


def is_switch(spec: Flag) -> bool:
    return spec.const is not None or value_type(spec) is bool


def bad_flags() -> Iterator[BadInput]:
    """Values of the command line."""
    for spec in SPECS:
        name = spec.names[0]
        for about, words in _bad_words(spec) if spec in OPEN else ():
            yield BadInput(name, f"{name} {about}", name, words=words)
        other = words_for_another_value(spec) if is_refused(spec) and not spec.idle_without else None
        if other:
            yield BadInput(name, f"{name} unsupported", other[0], words=tuple(other), named="not supported")
    for spec in OPEN:
        typo = spec.names[0][:-1]
        if not any(typo in other.names for other in SPECS):
            yield BadInput(spec.names[0], f"{spec.names[0]} misspelt", f"{typo}: ", words=(typo,))


def _bad_words(spec: Flag) -> Iterator[tuple[str, tuple[str, ...]]]:
    name, kind = spec.names[0], value_type(spec)
    if is_switch(spec):
        yield "with a value", (f"{name}=x",)
        return
    yield "without a value", (name,)
    if kind in (int, float):
        yield "of letters", (name, "many")
        yield from ((f"of {value}", (f"{name}={value}",)) for value in _out_of_range(spec, kind))
    elif get_origin(kind) is Literal or spec.choices:
        yield "of another kind", (name, "nonsense")
    elif kind is dict or get_origin(kind) is dict:
        yield "of a list", (name, "[1]")
        yield "cut off", (name, "{")
    elif spec.place:
        yield "of nothing", (name, "")
        yield "of a name too long", (name, "x" * 300)


def _out_of_range(spec: Flag, kind: type) -> Iterator[Any]:
    if not has_range(spec):
        return
    if spec.above is not None:
        yield spec.above
    if spec.at_least is not None and spec.at_least - 1 not in spec.also:
        yield spec.at_least - 1
    if spec.below is not None:
        yield spec.below
    if spec.at_most is not None:
        yield spec.at_most + 1
    yield from ("nan", "inf") if kind is float else (10**30,)


def bad_custom_configs() -> Iterator[BadInput]:
    """Keys and values of ``--custom-config-path``."""
    options = {spec.dest for spec in SPECS}
    for spec in OPEN:
        if spec.dest not in ("custom_config_path", "rollout_engine"):
            yield _custom_config(
                spec.names[0], f"{spec.dest} of another type", spec.dest, _of_another_type(spec)
            )
    for spec in OPEN:
        word = max(spec.dest.split("_"), key=len)
        misspelt = spec.dest.replace(word, word[:-1])
        if len(word) >= 4 and len(spec.dest) > 6 and misspelt not in options:
            yield _custom_config(spec.names[0], f"{spec.dest} misspelt", misspelt, "1")
    for name in sorted(derived_names() - options):
        yield _custom_config("custom config", f"{name}, which is derived", name, "1")


def _custom_config(flag: str, about: str, key: str, value: str) -> BadInput:
    path = "{site}/config.yaml"
    return BadInput(
        flag,
        f"custom config: {about}",
        f"--custom-config-path {path}:1: ",
        named=key,
        words=("--custom-config-path", path),
        files={"config.yaml": f"{key}: {value}\n".encode()},
    )


def _of_another_type(spec: Flag) -> str:
    several = get_origin(without_none(spec.type)[0]) is list
    return "{a: 1}" if several or value_type(spec) is str else "nonsense"


def bad_eval_configs() -> Iterator[BadInput]:
    """Fields of an eval YAML."""
    for spec in flags_of(EvalDatasetConfig):
        if spec.type is Any:
            continue
        values = [_of_another_type(spec)]
        if value_type(spec) in (int, float):
            values += [str(value) for value in _out_of_range(spec, value_type(spec))]
        for shown in values:
            fields_ = {"name": "held_out", "path": "x.jsonl"} | {spec.dest: shown}
            inner = ", ".join(f"{key}: {given}" for key, given in fields_.items())
            for section in ("datasets", "defaults"):
                yield _eval_config(section, spec.dest, shown, inner)


def _eval_config(section: str, name: str, value: str, inner: str) -> BadInput:
    rest = "" if section == "datasets" else f"defaults: {{{name}: {value}}}\n"
    text = rest + (f"datasets: [{{{inner}}}]\n" if not rest else "datasets: [{name: a, path: x.jsonl}]\n")
    return BadInput(
        f"eval config: {name}",
        f"eval config: {section}: {name} is {value}",
        "--eval-config",
        named=name,
        words=("--eval-config", "{site}/eval.yaml"),
        files={"eval.yaml": text.encode()},
    )


CONTENTS = {
    "empty": b"",
    "binary": b"\xff\xfe\x00\x01" * 20,
    "Latin-1": '{"é": "é"}\n'.encode("latin-1"),
    "another language": b"<html></html>\n",
    "a number": b"5\n",
    "cut off": b'{"input": [{"role": "user", "content": "1+',
}
READ_FILES = {
    "prompt_data": ("data.jsonl", "--prompt-data"),
    "eval_prompt_data": ("data.jsonl", "eval dataset held_out"),
    "eval_config": ("eval.yaml", "--eval-config"),
    "custom_config_path": ("config.yaml", "--custom-config-path"),
    "megatron_config_path": ("roles.yaml", "--megatron-config-path"),
    "load_debug_rollout_data": ("0.pt", "--load-debug-rollout-data"),
}


def bad_files() -> Iterator[BadInput]:
    """Files that are not there, or hold something else."""
    for flag, (file, said) in READ_FILES.items():
        for place in (file, "none" + file[file.rindex(".") :], "directory"):
            contents = CONTENTS if place == file else {place: b""}
            for about, content in contents.items():
                path: Any = f"{{site}}/{place}"
                value = ["held_out", path] if flag == "eval_prompt_data" else path
                yield BadInput(
                    f"--{_dashes(flag)}",
                    f"{flag} {about}",
                    said,
                    flags={flag: value} | ({"eval_interval": 1} if "eval" in flag else {}),
                    files={file: content} if place == file else {},
                )
    for flag in ("save", "save_hf", "metrics_file", "dump_details"):
        path = "{site}/file/below"
        name = f"--{_dashes(flag)}"
        yield BadInput(
            name, f"{flag} below a file", f"{name} {path}", flags={flag: path}, files={"file": b""}
        )
    for flag in ("save_debug_rollout_data", "save_debug_train_data"):
        name = f"--{_dashes(flag)}"
        yield BadInput(name, f"{flag} of a directory", f"{name} ", flags={flag: "{site}/directory"})


MODEL_FILES = {
    "hf_checkpoint": ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    "ref_load": ("config.json",),
    "load": (),
}
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "latest_checkpointed_iteration.txt")


def bad_models() -> Iterator[tuple[str, str, str, bytes]]:
    """A flag, a file of the model that it names, and what that holds instead, in words and as it is."""
    for flag, files in MODEL_FILES.items():
        for file in (*files, *WEIGHT_FILES):
            for about, content in CONTENTS.items():
                if (file, about) != ("latest_checkpointed_iteration.txt", "a number"):
                    yield flag, file, about, content
    yield "load", "latest_checkpointed_iteration.txt", "an iteration that is not there", b"5"


SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)


def bad_config_values() -> Iterator[tuple[str, Any]]:
    """A field of config.json, and what it is instead."""
    for name in SIZES:
        yield from ((name, value) for value in ("x", 0, -1, 1.5, 2**31, [1], {}, True))
    for name in ("rms_norm_eps", "rope_parameters"):
        yield from ((name, value) for value in ("x", -1, [1]))
    for name in ("attention_bias", "tie_word_embeddings", "model_type", "hidden_act"):
        yield from ((name, value) for value in ("x", 5, [1], {"a": 1}))


PLUG_INS = [spec for spec in OPEN if spec.dotted_path]
PARTNERS: dict[str, dict[str, Any]] = {
    "custom_loss_function_path": {"loss_type": "custom_loss"},
    "custom_tis_function_path": {"use_tis": True},
}
"""What else a run needs, to get as far as the plug-in."""


def bad_plug_ins() -> Iterator[BadInput]:
    """Dotted paths that name nothing to call."""
    wrong = ("nodots", "no_such_module.f", "json.no_such_name", "json.__doc__", "plug_in_that_raises.f", "")
    for spec in PLUG_INS:
        for path in wrong:
            yield BadInput(
                spec.names[0],
                f"{spec.names[0]} {path}",
                f"{spec.names[0]} {path}: ",
                flags=PARTNERS.get(spec.dest, {}) | {spec.dest: path},
                files={"plug_in_that_raises.py": b"raise RuntimeError('no key')\n"},
            )
    for spec in fields(EvalDatasetConfig):
        if spec.name.endswith("_path"):
            inner = f"name: held_out, path: '{{site}}/../prompts.jsonl', {spec.name}: json.no_such_name"
            yield BadInput(
                f"eval config: {spec.name}",
                f"eval config: {spec.name} of no code",
                "eval dataset held_out: ",
                named=spec.name,
                flags={"eval_config": "{site}/eval.yaml", "eval_interval": 1},
                files={"eval.yaml": f"datasets: [{{{inner}}}]\n".encode()},
            )


def _dashes(dest: str) -> str:
    return dest.replace("_", "-")


COMMAND_LINES = [
    *bad_flags(),
    *bad_custom_configs(),
    *bad_eval_configs(),
    *bad_files(),
    *bad_plug_ins(),
]
MODELS = list(bad_models())
CONFIG_VALUES = list(bad_config_values())


def by_flag() -> dict[str, list[BadInput]]:
    """The cases of each flag and each field."""
    found: dict[str, list[BadInput]] = {}
    for case in COMMAND_LINES:
        found.setdefault(case.flag, []).append(case)
    return found
