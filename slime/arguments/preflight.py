"""What the flags point to: files, directories, code. Looked at before any process is started."""

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.data import BUILT_IN_DATA_SOURCES
from slime.arguments.derive import CHECKPOINT_MARKER
from slime.arguments.flags import Flag
from slime.utils.misc import load_function


def missing_things(args: Namespace, specs: dict[str, Flag]) -> Iterator[str]:
    """Everything that is not there or cannot be used, one line each; cheap looks come first."""
    yield from _checkpoints(args)
    yield from _outputs(args)
    yield from _code(args, specs)
    yield from _tokenizer(args)
    yield from _data_files(args)


def _checkpoints(args: Namespace) -> Iterator[str]:
    directory = Path(args.hf_checkpoint)
    if not any(directory.glob("*.safetensors")) and not args.load:
        yield f"--hf-checkpoint {directory}: holds no .safetensors file"
    for name in ("ref_load", "load"):
        path = getattr(args, name)
        if path is None or (name == "load" and path == args.save):
            continue
        if not _is_checkpoint(Path(path)):
            wanted = f"{CHECKPOINT_MARKER} or config.json with .safetensors in it"
            yield f"--{name.replace('_', '-')} {path}: no checkpoint there (wanted: {wanted})"


def _is_checkpoint(path: Path) -> bool:
    return (path / CHECKPOINT_MARKER).is_file() or (path / "config.json").is_file()


# Flags that name an output, and whether it is a directory.
_OUTPUTS = {
    "save": True,
    "save_hf": True,
    "dump_details": True,
    "metrics_file": False,
    "save_debug_rollout_data": False,
    "save_debug_train_data": False,
}


def _bad_template(path: str) -> str | None:
    try:
        path.format(rollout_id=0)
    except (KeyError, IndexError, ValueError) as error:
        return f"cannot fill in {error} (wanted: no braces but {{rollout_id}})"
    return None


def _outputs(args: Namespace) -> Iterator[str]:
    for name, is_directory in _OUTPUTS.items():
        path = getattr(args, name)
        if path is None:
            continue
        reason = _bad_template(path) or _unwritable(Path(path), is_directory)
        if reason:
            yield f"--{name.replace('_', '-')} {path}: {reason}"
    if args.save_hf is not None and Path(args.save_hf).resolve() == Path(args.hf_checkpoint).resolve():
        yield f"--save-hf {args.save_hf}: is --hf-checkpoint itself"


def _unwritable(path: Path, is_directory: bool) -> str | None:
    """Why nothing can be written at ``path``, judged by it or its nearest existing parent."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    wants_directory = is_directory or existing != path
    if wants_directory != existing.is_dir():
        found, wanted = ("file", "directory") if wants_directory else ("directory", "file")
        return f"{existing} is a {found} (wanted: a {wanted})"
    return None if os.access(existing, os.W_OK) else f"{existing} is not writable"


def _code(args: Namespace, specs: dict[str, Flag]) -> Iterator[str]:
    for spec in specs.values():
        if not spec.dotted_path:
            continue
        value = getattr(args, spec.dest)
        for path in value if isinstance(value, list) else [value]:
            if path is not None and (reason := _unusable(path)):
                yield f"{spec.names[0]} {path}: {reason}"
    for dataset in args.eval_datasets:
        for key in ("custom_rm_path", "custom_generate_function_path"):
            path = getattr(dataset, key)
            if path is not None and (reason := _unusable(path)):
                yield f"eval dataset {dataset.name}: {key} {path}: {reason}"


def _unusable(path: str) -> str | None:
    """Why the object at a dotted path cannot be called."""
    try:
        found = load_function(path)
    except Exception as error:  # importing a user's module runs the user's code, which may raise anything
        text = str(error).removeprefix(f"dotted path {path!r}: ")
        return text if isinstance(error, ValueError) else f"its import fails: {type(error).__name__}: {text}"
    return None if callable(found) else f"is {type(found).__name__} (wanted: something to call)"


def _tokenizer(args: Namespace) -> Iterator[str]:
    from slime.utils.processing_utils import load_tokenizer

    try:
        tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception on a file it cannot parse
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        yield f"--hf-checkpoint {args.hf_checkpoint}: its tokenizer does not load ({reason})"
        return
    largest = max(tokenizer.get_vocab().values())
    if largest >= args.vocab_size:
        yield (
            f"--hf-checkpoint {args.hf_checkpoint}: the tokenizer does not fit the model: "
            f"token id {largest}, but vocab_size {args.vocab_size} (config.json)"
        )
    if args.apply_chat_template and not tokenizer.chat_template:
        yield "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template"


def _data_files(args: Namespace) -> Iterator[str]:
    dump, first = args.load_debug_rollout_data, args.start_rollout_id
    if dump is not None and (reason := _bad_template(dump)):
        yield f"--load-debug-rollout-data {dump}: {reason}"
    elif dump is not None and first is not None and not Path(dump.format(rollout_id=first)).is_file():
        yield f"--load-debug-rollout-data {dump}: no such file for rollout {first}"
    built_in = args.data_source_path.startswith(BUILT_IN_DATA_SOURCES)
    if args.prompt_data is not None and args.rollout_global_dataset and built_in:
        yield from _data_file("--prompt-data", args.prompt_data, args.input_key, args.label_key)
    for dataset in args.eval_datasets:
        yield from _data_file(
            f"eval dataset {dataset.name}", dataset.path, dataset.input_key, dataset.label_key
        )


def _data_file(flag: str, path: str, input_key: str | None, label_key: str | None) -> Iterator[str]:
    """Reads the whole file: a malformed line is reported now and not after hours."""
    from slime.utils.data import DataError, check_record, read_records  # imports transformers and pyarrow

    try:
        for where, record in read_records(path):
            check_record(where, record, input_key, label_key)
    except (DataError, OSError) as error:
        yield f"{flag}: {error}"
