"""Makes a Hugging Face directory of another one, tensor by tensor: what converters of formats have in common.

A process holds one tensor and what becomes of it, for each of its threads. The new directory gets its name
when all of it is there.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from slime.models.checkpoint.expert_forms import parts_of
from slime.models.checkpoint.quantization import KEYS
from slime.models.checkpoint.safetensors_dir import TensorReader
from slime.models.checkpoint.safetensors_file import SafetensorFile, Spec, nbytes
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.hf_config import HfConfig, HfConfigError, read_hf_config
from slime.training.hf_export import copy_assets

_INDEX = "model.safetensors.index.json"


class Recipe(Protocol):
    """What becomes of the tensors of a checkpoint."""

    def specs(self, name: str, spec: Spec) -> dict[str, Spec]:
        """Names and formats of what becomes of a tensor."""

    def convert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns what a tensor becomes, with values.

        Raises:
            ValueError: the tensor has values that cannot be converted.
        """

    def config(self, config: dict[str, Any], names: Iterable[tuple[str, Spec]]) -> dict[str, Any]:
        """The new config.json; ``names`` are all tensors of the old checkpoint."""


class MatrixReader(WeightsReader):
    """A `WeightsReader` whose experts are read one by one whatever form the checkpoint has them in."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        shapes = {name: super(MatrixReader, self).shape(name) for name in super().names()}
        self._parts = parts_of(shapes, HfConfig.read(path))
        self._whole = {part.stack for part in self._parts.values()}

    def names(self) -> list[str]:
        return [name for name in super().names() if name not in self._whole] + list(self._parts)

    def file_of(self, name: str) -> str:
        return super().file_of(self._parts[name].stack if name in self._parts else name)

    def dtype(self, name: str) -> torch.dtype:
        return super().dtype(self._parts[name].stack if name in self._parts else name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return super().shape(name)
        _, rows, columns = super().shape(self._parts[name].stack)
        return rows // self._parts[name].parts, columns

    def read(self, name: str) -> torch.Tensor:
        if name not in self._parts:
            return super().read(name)
        part, rows = self._parts[name], self.shape(name)[0]
        box = [slice(part.expert, part.expert + 1), slice(part.place * rows, (part.place + 1) * rows)]
        return self.read_part(part.stack, box)[0]


def rewrite(source: Path, target: Path, recipe: Recipe, workers: int = 1) -> None:
    """Writes the directory ``target``, its files under the names that they have in ``source``.

    Raises:
        ValueError: ``source`` cannot be read or has nothing to convert, or experts that
            cannot be, ``target`` is there, or the disk has
            no room for it.
        OSError: a file cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: is there and not empty (wanted: a new directory)")
    config = read_hf_config(source)
    with MatrixReader(source) as reader:
        reader.open_all()
        old = {name: (reader.dtype(name), reader.shape(name)) for name in reader.names()}
        files: dict[str, list[str]] = defaultdict(list)
        for name in old:
            files[reader.file_of(name)].append(name)
    new = {name: recipe.specs(name, spec) for name, spec in old.items()}
    if all(new[name] == {name: spec} for name, spec in old.items()):
        raise ValueError(f"{source}: has no tensor that would be converted")
    for name, spec in old.items():
        if len(spec[1]) == 3 and ".experts." in name and new[name] == {name: spec}:
            raise ValueError(
                f"{source}: {name} {list(spec[1])} would stay as it is, and experts are most of a model "
                "(wanted: a family whose experts can be taken apart)"
            )
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _require_room(partial, new.values())
    copy_assets(source, partial)
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(_write, source, partial / file, names, recipe) for file, names in files.items()]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if len(files) > 1 or (source / _INDEX).is_file():
        _write_index(partial, {file: [new[name] for name in names] for file, names in files.items()})
    text = json.dumps(recipe.config(config, old.items()), indent=2) + "\n"
    (partial / "config.json").write_text(text)
    if target.exists():
        target.rmdir()
    partial.rename(target)


def require_plain(source: Path) -> None:
    """Raises ValueError if the weights of a directory are quantised."""
    try:
        config = read_hf_config(source)
    except HfConfigError as error:
        raise ValueError(str(error)) from error
    if any(config.get(key) for key in KEYS):
        raise ValueError(f"{source}: is quantised already (wanted: weights in bfloat16, float16 or float32)")


def _write(source: Path, file: Path, names: list[str], recipe: Recipe) -> None:
    with MatrixReader(source) as reader:
        specs: dict[str, Spec] = {}
        for name in names:
            specs |= recipe.specs(name, (reader.dtype(name), reader.shape(name)))
        with SafetensorFile(file, specs) as out:
            for name in names:
                for new, tensor in _converted(recipe, reader, name).items():
                    out.write(new, tensor)


def _converted(recipe: Recipe, reader: TensorReader, name: str) -> dict[str, torch.Tensor]:
    try:
        return recipe.convert(name, reader.read(name))
    except ValueError as error:
        raise ValueError(f"{reader.path}: {name}: {error}") from error


def _require_room(directory: Path, new: Iterable[Mapping[str, Spec]]) -> None:
    wanted = sum(nbytes(spec) for specs in new for spec in specs.values())
    free = shutil.disk_usage(directory).free
    if wanted > free:
        directory.rmdir()
        raise ValueError(f"{directory.parent}: {free} bytes are free (wanted: {wanted})")


def _write_index(directory: Path, files: Mapping[str, list[dict[str, Spec]]]) -> None:
    weight_map = {name: file for file, parts in files.items() for specs in parts for name in specs}
    total = sum(nbytes(spec) for parts in files.values() for specs in parts for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
