"""What the flags point to: files, directories, code. Looked at before any process is started."""

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.utils.arguments.derive import CHECKPOINT_MARKER
from slime.utils.arguments.flags import Flag
from slime.utils.data import DataError, read_records
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


def _outputs(args: Namespace) -> Iterator[str]:
    outputs = {
        "save": args.save,
        "save_hf": args.save_hf,
        "metrics_file": args.metrics_file,
        "save_debug_rollout_data": args.save_debug_rollout_data,
        "save_debug_train_data": args.save_debug_train_data,
    }
    for name, path in outputs.items():
        if path is not None and (reason := _unwritable(Path(path))):
            yield f"--{name.replace('_', '-')} {path}: {reason}"
    if args.save_hf is not None and Path(args.save_hf).resolve() == Path(args.hf_checkpoint).resolve():
        yield f"--save-hf {args.save_hf}: is --hf-checkpoint itself"


def _unwritable(path: Path) -> str | None:
    """Why nothing can be written at ``path``, judged by its nearest existing parent."""
    for parent in (path, *path.absolute().parents):
        if parent.exists():
            if parent != path and not parent.is_dir():
                return f"{parent} is a file (wanted: a directory)"
            return None if os.access(parent, os.W_OK) else f"{parent} is not writable"
    return None


def _code(args: Namespace, specs: dict[str, Flag]) -> Iterator[str]:
    for spec in specs.values():
        if not spec.dotted_path:
            continue
        value = getattr(args, spec.dest)
        for path in value if isinstance(value, list) else [value]:
            if path is None:
                continue
            try:
                load_function(path)
            except ValueError as error:
                yield f"{spec.names[0]} {path}: {str(error).removeprefix(f'dotted path {path!r}: ')}"


def _tokenizer(args: Namespace) -> Iterator[str]:
    from slime.utils.processing_utils import load_tokenizer

    try:
        tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        yield f"--hf-checkpoint {args.hf_checkpoint}: its tokenizer does not load ({str(error).splitlines()[0]})"
        return
    largest = max(tokenizer.get_vocab().values())
    if largest >= args.vocab_size:
        yield (
            f"--hf-checkpoint {args.hf_checkpoint}: the tokenizer does not fit the model: token id {largest}, "
            f"but vocab_size {args.vocab_size} (config.json)"
        )
    if args.apply_chat_template and not tokenizer.chat_template:
        yield "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template"


def _data_files(args: Namespace) -> Iterator[str]:
    if args.prompt_data is not None and args.rollout_global_dataset:
        yield from _data_file("--prompt-data", args.prompt_data, args.input_key, args.label_key)
    for dataset in args.eval_datasets:
        yield from _data_file(
            f"eval dataset {dataset.name}", dataset.path, dataset.input_key, dataset.label_key
        )


def _data_file(flag: str, path: str, input_key: str | None, label_key: str | None) -> Iterator[str]:
    """Reads the whole file: a malformed line is reported now and not after hours."""
    try:
        for where, record in read_records(path):
            for key in (input_key, label_key):
                if key is not None and key not in record:
                    found = ", ".join(sorted(record))
                    yield f"{flag}: {where} has no field {key!r} (found: {found})"
                    return
    except (DataError, OSError) as error:
        yield f"{flag}: {error}"
