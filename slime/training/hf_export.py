"""Exports the model as a Hugging Face checkpoint directory that ``transformers`` loads."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from slime.config.backend import BackendConfig
from slime.models.checkpoint.passthrough import passthrough_names
from slime.models.checkpoint.quantization import KEYS
from slime.models.checkpoint.safetensors_file import SafetensorFile, Spec, nbytes
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.hf_config import read_hf_config
from slime.models.mtp import is_copy
from slime.training.checkpoint_dir import fresh_directory, on_first_rank
from slime.training.checkpoint_errors import (
    RankWriteError,
    explained,
    on_every_rank,
    raise_first,
)
from slime.training.weights import NamedTensors, Weights
from slime.utils.plain_file import is_write_error

SHARD_BYTES = 5 * 1024**3
_INDEX = "model.safetensors.index.json"
_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")


@dataclass(frozen=True)
class ExportBase:
    """What an export takes over, and how it is written.

    Attributes:
        source: directory of the checkpoint that training began with.
        dtype: number format of the weights.
        ranks_per_node: the first of so many ranks writes; None for the first of all.
    """

    source: Path
    dtype: torch.dtype
    ranks_per_node: int | None = None

    @staticmethod
    def of(config: BackendConfig) -> "ExportBase":
        """Returns what the exports of a run are based on."""
        source = Path(config.hf_checkpoint.hf_checkpoint)
        return ExportBase(source, config.precision.params_dtype, config.cluster.actor_num_gpus_per_node)


def save_hf_model_to_path(
    base: ExportBase,
    path: str | Path,
    weights: Weights,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config, tokenizer and weights to the directory ``path``. Called on every rank.

    Tensors of the base that are not trained, as those of a tower for images, are carried over.

    The files are written beside ``path`` first and moved there when all are complete. Weights that an earlier
    export left in ``path`` are removed, other files of that name replaced.

    Raises:
        ValueError: ``path`` is the base itself, which an export must not overwrite.
        CheckpointError: a rank could not write; all raise it, and what was written is removed.
    """
    target, source = Path(path), base.source
    if target.resolve() == source.resolve():
        raise ValueError(f"--save-hf {path}: is --hf-checkpoint itself (wanted: another directory)")
    partial = target.with_name(f".{target.name}.partial")

    def complete(shards: list[dict[str, int]]) -> None:
        shards += _write_kept(source, partial, shards, shard_bytes, base.dtype)
        _name_shards(partial, shards)
        _copy_assets(source, partial, base.dtype)
        _publish(partial, target)

    with explained(path, "written", "space there, and leave to write"), _removed_if_it_fails(partial):
        on_first_rank(lambda: fresh_directory(partial))
        shards = _write_shards(partial, weights, shard_bytes, _writers(base.ranks_per_node))
        on_first_rank(lambda: complete(shards))


@contextmanager
def _removed_if_it_fails(partial: Path) -> Iterator[None]:
    try:
        yield
    except RankWriteError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _writers(ranks_per_node: int | None) -> list[int]:
    """The first rank of each node."""
    return list(range(0, dist.get_world_size(), ranks_per_node or dist.get_world_size()))


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_shards(
    directory: Path, weights: Weights, shard_bytes: int, writers: list[int]
) -> list[dict[str, int]]:
    """Shard i is written by node ``i mod nodes``. Returns for each shard its tensors' names and bytes.

    A rank that cannot write gathers the rest of the weights with the others, and then fails with them.
    """
    shards: list[dict[str, int]] = []
    failures: list[Exception] = []
    for number, bucket in enumerate(weights.buckets(shard_bytes), start=1):
        if dist.get_rank() == writers[(number - 1) % len(writers)] and not failures:
            try:
                _write(directory / _shard_name(number, 0), bucket)
            except (OSError, RuntimeError) as error:
                if not is_write_error(error):
                    raise
                failures.append(error)
        shards.append({name: tensor.nbytes for name, tensor in bucket})
    on_every_rank(lambda: raise_first(failures))
    return shards


def _write(file: Path, bucket: NamedTensors) -> None:
    with SafetensorFile(file, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket}) as out:
        for name, tensor in bucket:
            out.write(name, tensor)


def _write_kept(
    source: Path,
    directory: Path,
    there: Sequence[Mapping[str, int]],
    shard_bytes: int,
    dtype: torch.dtype,
) -> list[dict[str, int]]:
    """Copies what is not trained, tensor by tensor, into shards behind those that are ``there``.

    Copies of embedding and head are left out: these have been trained, and the copies are the old ones.
    """
    trained = {name for shard in there for name in shard}
    if not any(source.glob("*.safetensors")):
        return []
    shards = []
    with WeightsReader(source) as reader:
        # What the source has quantised gets the format of the other weights.
        specs: dict[str, Spec] = {
            name: (dtype if name in reader.quantized else reader.dtype(name), reader.shape(name))
            for name in passthrough_names(source, reader)
            if name not in trained and not is_copy(name)
        }
        for number, part in enumerate(_packed(specs, shard_bytes), start=len(there) + 1):
            with SafetensorFile(directory / _shard_name(number, 0), part) as out:
                for name, spec in part.items():
                    out.write(name, reader.read(name).to(spec[0]))
            shards.append({name: nbytes(spec) for name, spec in part.items()})
    return shards


def _packed(specs: Mapping[str, Spec], most_bytes: int) -> Iterator[dict[str, Spec]]:
    """Groups of at most so many bytes; a larger tensor comes alone."""
    part: dict[str, Spec] = {}
    used = 0
    for name, spec in specs.items():
        if part and used + nbytes(spec) > most_bytes:
            yield part
            part, used = {}, 0
        part[name] = spec
        used += nbytes(spec)
    if part:
        yield part


def _name_shards(directory: Path, shards: list[dict[str, int]]) -> None:
    """Final names, known once all shards are written; an index if there is more than one."""
    count = len(shards)
    if count == 1:
        (directory / _shard_name(1, 0)).rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = _shard_name(number, count)
        (directory / _shard_name(number, 0)).rename(directory / name)
        weight_map.update(dict.fromkeys(tensors, name))
    total = sum(size for tensors in shards for size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def copy_assets(source: Path, target: Path) -> None:
    """Copies the files of a checkpoint directory that hold no weights."""
    for file in assets_of(source):
        shutil.copyfile(file, target / file.name)


def assets_of(source: Path) -> Iterator[Path]:
    """The files of a checkpoint directory that hold no weights."""
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHT_PATTERNS):
            yield file


def _copy_assets(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Everything of the source checkpoint but its weights; config.json gets the dtype of the new ones.

    They are not quantised, even if those of the source are.
    """
    copy_assets(source, target)
    config = {name: value for name, value in read_hf_config(source).items() if name not in KEYS}
    name = str(dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
    if isinstance(nested := config.get("text_config"), dict):
        config["text_config"] = nested | {key: name for key in ("dtype", "torch_dtype") if key in nested}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _publish(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    for pattern in _WEIGHT_PATTERNS:
        for old in target.glob(pattern):
            old.unlink()
    for file in partial.iterdir():
        file.replace(target / file.name)
    partial.rmdir()
