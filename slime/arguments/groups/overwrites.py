"""Outputs that are inputs: a run does not write over what it reads."""

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from string import Formatter

from slime.arguments.core.flag import given, option_string
from slime.arguments.core.group import ConfigGroup

_OF_A_MODEL = frozenset({".json", ".jinja", ".model", ".safetensors", ".txt"})
_SLICE = re.compile(r"@\[[^\]]*\]$")


@dataclass(frozen=True)
class _Output:
    """A place that is written to. ``pattern`` matches the paths that its template may become."""

    flag: str
    path: str
    pattern: re.Pattern[str]

    def is_at(self, other: str) -> bool:
        real = os.path.realpath(other)
        if self.pattern.fullmatch(real):
            return True
        return os.path.exists(self.path) and os.path.exists(real) and os.path.samefile(self.path, real)


def _template(flag: str, path: str) -> _Output:
    parts = Formatter().parse(os.path.realpath(path))
    ids = r"(eval_)?\s*\d+"
    pattern = "".join(re.escape(text) + (ids if field is not None else "") for text, field, _, _ in parts)
    return _Output(flag, path, re.compile(pattern))


def _literal(flag: str, path: str) -> _Output:
    return _Output(flag, path, re.compile(re.escape(os.path.realpath(path))))


def missing(args: Namespace) -> Iterator[str]:
    """Files and directories of the run's own that something else is read from or written to."""
    files = list(_written_files(args))
    for output in files:
        for source, path in _read_files(args):
            if output.is_at(path):
                yield f"{output.flag} {output.path}: would overwrite {source} (wanted: another file)"
        for source, path in _models(args):
            if _is_of_a_model(output, path):
                yield f"{output.flag} {output.path}: is a file of {source} (wanted: another file)"
    for one, other in combinations(files, 2):
        if other.path == one.path or one.is_at(other.path):
            yield f"{one.flag} and {other.flag}: the same file"
    yield from _models_written_over(args)


def _written_files(args: Namespace) -> Iterator[_Output]:
    if args.metrics_file is not None:
        yield _literal("--metrics-file", args.metrics_file)
    for name, path in given(args, "save_debug_rollout_data", "save_debug_train_data"):
        yield _template("--dump-details" if args.dump_details is not None else name, path)


def _read_files(args: Namespace) -> Iterator[tuple[str, str]]:
    if args.prompt_data is not None:
        yield "--prompt-data", _SLICE.sub("", args.prompt_data)
    for dataset in args.eval_datasets:
        yield f"eval dataset {dataset.name}", _SLICE.sub("", dataset.path)
    yield from given(args, "eval_config", "custom_config_path", "megatron_config_path")
    for name, dump in given(args, "load_debug_rollout_data", "load_forge_rollout_data"):
        yield name, dump.format(rollout_id=args.start_rollout_id or 0)


def _models(args: Namespace) -> Iterator[tuple[str, str]]:
    yield from given(args, "hf_checkpoint", "ref_load", "load", "critic_load")


def _is_of_a_model(output: _Output, model: str) -> bool:
    path = Path(output.path)
    return path.suffix in _OF_A_MODEL and path.is_file() and path.parent.resolve() == Path(model).resolve()


def _models_written_over(args: Namespace) -> Iterator[str]:
    """A run goes on in ``--save``, so ``--load`` may be the same; HF exports are never gone on from."""
    save = _literal("--save", args.save) if args.save is not None else None
    exports = _template("--save-hf", args.save_hf) if args.save_hf is not None else None
    for source, path in _models(args):
        if exports and exports.is_at(path):
            yield f"--save-hf {exports.path}: would overwrite {source} (wanted: another directory)"
        moves = source == "--ref-load" and args.ref_ckpt_step is None
        if save and (source == "--hf-checkpoint" or moves) and save.is_at(path):
            yield f"--save {save.path}: would write over {source} (wanted: another directory)"
    for name in ("ref", "opd_teacher") if save and args.keep_checkpoints is not None else ():
        place, step = getattr(args, f"{name}_load"), getattr(args, f"{name}_ckpt_step")
        if save and place is not None and step is not None and save.is_at(place):
            reason = f"would remove iteration {step} of {option_string(f'{name}_load')}"
            yield f"--keep-checkpoints {args.keep_checkpoints}: {reason} (wanted: a copy of it elsewhere)"


CONFIG_GROUP = ConfigGroup({}, missing=missing)
