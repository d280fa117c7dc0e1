"""The Hugging Face directory that says what the model is: its config, tokenizer and first weights."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.checkpoint_files import (
    CHECKPOINT_MARKER,
    bad_checkpoint,
    has_checkpoint,
    unreadable_weights,
    unusable_values,
)
from slime.arguments.validate.records import has_tokenizer, tokenizer_of
from slime.arguments.validate.tokenizer_process import ask
from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.models import HfConfigError
from slime.models.hf_config import read_hf_config, read_stop_ids

_LONGEST_REASON = 300


def notes(args: Namespace) -> Iterator[str]:
    """A second name."""
    if args.model_name is not None:
        yield f"--model-name {args.model_name}: has no effect, config.json of --hf-checkpoint names the model"


def missing(args: Namespace) -> Iterator[str]:
    """Weights to start from; its config.json was read for the shape."""
    directory = Path(args.hf_checkpoint)
    if (directory / CHECKPOINT_MARKER).is_file():
        yield from bad_checkpoint(args, "hf_checkpoint", None)
    if args.check:
        return
    elsewhere = any(path is not None and has_checkpoint(path) for path in (args.load, args.ref_load))
    if not any(directory.glob("*.safetensors")) and not elsewhere:
        yield f"--hf-checkpoint {directory}: holds no .safetensors file"


def unusable(args: Namespace) -> Iterator[str]:
    """Weights and stop ids that cannot be read, a tokenizer that does not load or is another model's."""
    unreadable = list(_unusable_files(args))
    yield from unreadable or unusable_values(args, "hf_checkpoint")


def _unusable_files(args: Namespace) -> Iterator[str]:
    yield from unreadable_weights(args, "hf_checkpoint")
    if reason := _bad_auto_map(args):
        yield f"--hf-checkpoint {args.hf_checkpoint}: config.json: auto_map {reason}"
    try:
        read_stop_ids(args.hf_checkpoint)
    except HfConfigError as error:
        yield f"--hf-checkpoint {args.hf_checkpoint}: {error}"
    if not has_tokenizer(args.hf_checkpoint):
        if not args.check:  # transformers would make one without a vocabulary
            wanted = "wanted: tokenizer.json, for instance"
            yield f"--hf-checkpoint {args.hf_checkpoint}: holds no tokenizer ({wanted})"
        return
    try:
        largest, has_template = _tokenizer_properties(args.hf_checkpoint, args.trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception on a file it cannot parse
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        yield f"--hf-checkpoint {args.hf_checkpoint}: its tokenizer does not load ({reason})"
        return
    if largest >= args.vocab_size:
        yield (
            f"--hf-checkpoint {args.hf_checkpoint}: the tokenizer does not fit the model: "
            f"token id {largest}, but vocab_size {args.vocab_size} (config.json)"
        )
    if args.apply_chat_template and not has_template:
        yield "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template"


def _bad_auto_map(args: Namespace) -> str | None:
    """Why it is none, or, where ``--trust-remote-code`` asks for it, why its code cannot be found."""
    found = read_hf_config(args.hf_checkpoint).get("auto_map")
    if found is None:
        return None
    if not isinstance(found, dict):
        return f"is {found!r:.80} (wanted: a mapping from auto class to module.Class)"
    for name, value in found.items():
        for path in value if isinstance(value, list) else [value]:
            if not _is_code(path, Path(args.hf_checkpoint), args.trust_remote_code):
                return (
                    f"says {path!r:.80} for {name} (wanted: module.Class, and module.py beside config.json)"
                )
    return None


def _is_code(path: object, directory: Path, is_run: bool) -> bool:
    """Whether an entry of ``auto_map`` names a class, and one that is there if it ``is_run``."""
    if path is None or (isinstance(path, str) and "--" in path):  # code of another repository
        return True
    module, _, cls = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    return bool(module and cls) and (not is_run or (directory / f"{module}.py").is_file())


def _tokenizer_properties(path: str, trust_remote_code: bool) -> tuple[int, bool]:
    """The largest token id, and whether there is a chat template; of the process that loads tokenizers."""
    found = None if trust_remote_code else ask(_load_tokenizer, path, trust_remote_code)
    return _load_tokenizer(path, trust_remote_code) if found is None else found


def _load_tokenizer(path: str, trust_remote_code: bool) -> tuple[int, bool]:
    tokenizer_of.cache_clear()  # its files may be others by now
    tokenizer = tokenizer_of(path, trust_remote_code)
    return max(tokenizer.get_vocab().values(), default=-1), bool(tokenizer.chat_template)


CONFIG_GROUP = ConfigGroup({"model": HfCheckpointConfig}, notes=notes, missing=missing, unusable=unusable)
