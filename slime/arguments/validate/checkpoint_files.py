"""Whether the files of a checkpoint are such that a run can load them.

A checkpoint is a directory: of the trainer's own, with a marker that names the last complete iteration, or a
Hugging Face one, with a ``config.json``.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard, cast

from slime.arguments.core.flag import option_string
from slime.config.model import ModelConfig
from slime.config.mtp import MtpConfig
from slime.config.run import filled
from slime.config.trainers import trainer_of
from slime.models import FAMILIES, HfConfigError, read_shape, shape_of_any
from slime.models.checkpoint.inspection import bad_weights, weight_names
from slime.models.checkpoint.quantization import read_quantization
from slime.models.hf_config import HfConfig
from slime.models.mtp import trained_mtp_layers
from slime.utils.checkpoint_record import damage, iterations

CHECKPOINT_MARKER = "latest_checkpointed_iteration.txt"
# What Megatron-LM's converters write into the marker.
_CONVERTED = "release"


def has_checkpoint(path: str | Path) -> bool:
    """Whether something there says that it is a checkpoint."""
    return any((Path(path) / file).is_file() for file in (CHECKPOINT_MARKER, "config.json"))


def is_conversion(path: str | Path, hf_checkpoint: str | Path) -> bool:
    """Whether ``path`` names a conversion of this Hugging Face directory, and has none of its weights."""
    named_after = Path(path).name.casefold().startswith(Path(hf_checkpoint).name.casefold())
    return named_after and is_release(path) and not (Path(path) / _CONVERTED / "metadata.json").is_file()


def is_release(path: str | Path) -> bool:
    """Whether a converter wrote what the marker names: weights alone, of no iteration."""
    return _marked(Path(path)) == _CONVERTED


def _marked(root: Path) -> str | None:
    """What the marker of a checkpoint says; None without one."""
    marker = root / CHECKPOINT_MARKER
    return marker.read_bytes()[:100].decode(errors="replace").strip() if marker.is_file() else None


def _has_weights(path: str | Path) -> bool:
    """Whether there is more than a config.json; ``--check`` does without."""
    return (Path(path) / CHECKPOINT_MARKER).is_file() or any(Path(path).glob("*.safetensors"))


def marked_iteration(root: str | Path | None) -> int | None:
    """The iteration that the marker of a checkpoint names; None without one, or if it says something else."""
    text = (_marked(Path(root)) or "") if root else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def newest_whole(
    root: str | Path | None, verify: str, up_to: int | None = None
) -> tuple[int | None, list[str]]:
    """Finds the newest iteration, from the marked one on back, whose files are as they were written.

    Args:
        up_to: no iteration after this one.

    Returns:
        The iteration; None if none is marked, or none is whole. And of each damaged one that is newer what
        is wrong with it.
    """
    marked = marked_iteration(root)
    if root is None or marked is None:
        return marked, []
    if verify == "none" and (up_to is None or marked <= up_to):
        return marked, []
    skipped: list[str] = []
    there = iterations(Path(root))
    newest = marked if up_to is None else min(marked, up_to)
    for number in (number for number in there if marked in there and number <= newest):
        reason = _damage(there[number], verify)
        if reason is None:
            return number, skipped
        skipped.append(f"{there[number].name}: {reason}")
    return None, skipped


def newest_of_all(roots: Sequence[str | Path | None], verify: str) -> int | None:
    """Finds the newest iteration that is whole in each of several directories.

    Returns:
        The earliest of their newest whole ones if there is none; None if one of them has no whole one.
    """
    step: int | None = None
    while True:
        found = [newest_whole(root, verify, step)[0] for root in roots]
        known = [number for number in found if number is not None]
        if len(known) < len(found):
            return None
        if step is not None and min(known) >= step:
            return step
        step = min(known)


def _damage(directory: Path, verify: str) -> str | None:
    """What is wrong with the first damaged file; reads all of them once, if at all."""
    if verify == "none":
        return None
    directory = Path(os.path.abspath(directory))  # flags are looked at before their places are made absolute
    looks = [(path, path.stat()) for path in sorted(directory.rglob("*")) if path.is_file()]
    stamp = tuple((str(path), look.st_size, look.st_mtime_ns) for path, look in looks)
    return _known_damage(directory, verify == "checksums", stamp)


@lru_cache(64)
def _known_damage(directory: Path, checksums: bool, stamp: tuple[tuple[str, int, int], ...]) -> str | None:
    return next(damage(directory, checksums), None)


def bad_checkpoint(args: Namespace, name: str, step: int | None) -> Iterator[str]:
    """Why the directory that this flag names cannot be loaded; nothing without the flag.

    Args:
        step: the iteration to load; None for the one that the marker names.
    """
    path = getattr(args, name)
    if path is None or (args.check and not _has_weights(path)):
        return
    if not has_checkpoint(path):
        reason: str | None = (
            f"no checkpoint there (wanted: {CHECKPOINT_MARKER} or config.json with .safetensors in it)"
        )
    elif (Path(path) / CHECKPOINT_MARKER).is_file():
        reason = _bad_iteration(Path(path), step, args.verify_checkpoint)
    elif not any(Path(path).glob("*.safetensors")):
        reason = "holds no .safetensors file"
    else:
        reason = _another_model(args, Path(path), Path(args.hf_checkpoint))
    if reason:
        yield f"{option_string(name)} {path}: {reason}"


def _bad_iteration(root: Path, step: int | None, verify: str) -> str | None:
    text = _marked(root) or ""
    if step is None and text == _CONVERTED:
        complete = (root / _CONVERTED / "metadata.json").is_file()
        return None if complete else f"{CHECKPOINT_MARKER} says {text!r}, which is missing or incomplete"
    if step is None and marked_iteration(root) is None:
        return f"{CHECKPOINT_MARKER} says {text!r} (wanted: the number of an iteration)"
    iteration = f"iter_{int(text) if step is None else step:07d}"
    if (root / iteration / "metadata.json").is_file():
        return _half_copied(root / iteration) or _damaged(root / iteration, verify)
    there = ", ".join(sorted(found.parent.name for found in root.glob("iter_*/metadata.json"))) or "none"
    return f"{iteration} is missing or incomplete (complete ones: {there})"


def _damaged(iteration: Path, verify: str) -> str | None:
    reason = _damage(iteration, verify)
    wanted = "a complete copy, another iteration, or --verify-checkpoint none"
    return reason and f"{iteration.name}: {reason} (wanted: {wanted})"


def _half_copied(iteration: Path) -> str | None:
    """Why a directory that was written as a whole lacks parts; only looks at names.

    Hidden files are what copies by pattern leave behind.
    """
    shards = list(iteration.rglob("*.distcp"))
    if not shards and (iteration / "common.pt").is_file():
        return f"{iteration.name} holds no .distcp file (wanted: a complete copy)"
    for shard in shards:
        if not (index := shard.with_name(".metadata")).is_file():
            return f"{index.relative_to(iteration.parent)} is missing (wanted: a complete copy)"
    return None


def _another_model(args: Namespace, path: Path, trained: Path) -> str | None:
    try:
        found, wanted = _shape(args, path), _shape(args, trained)
    except HfConfigError as error:
        return str(error)
    for name, value in wanted.items():
        if name != "max_position_embeddings" and found[name] != value:
            return f"is another model than --hf-checkpoint: its {name} is {found[name]} (wanted: {value})"
    return None


def _shape(args: Namespace, path: Path) -> dict[str, Any]:
    if trainer_of(args).transformers_model:
        return shape_of_any(path, args.trust_remote_code)
    return vars(read_shape(path))


def _has_hf_weights(path: str | None) -> TypeGuard[str]:
    if path is None or (Path(path) / CHECKPOINT_MARKER).is_file():
        return False
    return any(Path(path).glob("*.safetensors"))


def unusable_weights(args: Namespace, name: str) -> Iterator[str]:
    """Why the weights of a Hugging Face directory cannot be used, by their headers and a few values."""
    unreadable = list(unreadable_weights(args, name))
    yield from unreadable or unusable_values(args, name)


def unreadable_weights(args: Namespace, name: str) -> Iterator[str]:
    """Why they cannot be read; reads no more than their headers."""
    path = getattr(args, name)
    if not _has_hf_weights(path):
        return
    try:
        missing = _wanted_names(args, name) - weight_names(path)
    except (ValueError, OSError) as error:
        yield f"{option_string(name)}: {error}"
        return
    if missing:
        wanted = f"{len(missing)} tensors of config.json are missing, e.g. {sorted(missing)[0]}"
        yield f"{option_string(name)} {path}: {wanted}"


def unusable_values(args: Namespace, name: str) -> Iterator[str]:
    """What headers and a few values say against weights that can be read."""
    path = getattr(args, name)
    if not _has_hf_weights(path):
        return
    described = path if (Path(path) / "config.json").is_file() else args.hf_checkpoint
    if reason := bad_values(path, described):
        yield f"{option_string(name)}: {reason}"


def bad_values(path: str | Path, described: str | Path) -> str | None:
    """What headers and a few values say against weights; ``described`` is where their config.json is."""
    config = HfConfig.read(described)
    shape = read_shape(described) if config.get("model_type") in FAMILIES else None
    return bad_weights(path, shape, read_quantization(config))


def _wanted_names(args: Namespace, name: str) -> set[str]:
    """The tensors of the model that this flag is about; without a family ``transformers`` will say.

    Only what the actor may start with needs its MTP layers.
    """
    family = FAMILIES.get(args.model_type)
    if family is None:
        return set()
    further = (
        trained_mtp_layers(filled(MtpConfig, args)) if name in ("hf_checkpoint", "load", "ref_load") else 0
    )
    return set(family.weights.hf_names(cast(ModelConfig, args), further))
