"""Weights as checkpoints in a directory that trainer and engines share."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from slime.config.weight_update import WeightUpdateConfig
from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.checkpoint.safetensors_file import SafetensorFile
from slime.models.checkpoint.safetensors_index import INDEX
from slime.models.checkpoint.tensor_slices import bytes_of
from slime.training.hf_export import copy_assets
from slime.training.weights import NamedTensors
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.session import SessionTransport

MANIFEST = "manifest.json"
_VERSION = re.compile(r"\.?weight_v(\d{6,})(\.partial)?")


class DiskTransport(SessionTransport):
    """Trainer rank 0 writes a version while engines generate; they stand still only to load it.

    They do so by SGLang's own ``/update_weights_from_disk``, which needs no session. When all of them have
    confirmed a version the others are removed.
    """

    choice = "disk"

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._root = Path(config.weight_sync.update_weight_disk_dir or "").absolute()
        self._keeps_files = config.weight_sync.update_weight_disk_keep_files
        self._assets = Path(config.engines.synced_checkpoint)
        self._staged: StagedVersion | None = None

    def open(self, version: str, plan: WeightPlan) -> None:
        self._version, self._plan = version, plan
        if self._engines.endpoints:
            with self._on_disk():
                self._staged = StagedVersion(self._root, int(version))

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._staged is None:
            return 0
        with self._on_disk():
            return self._staged.write(bucket)

    def commit(self) -> None:
        if self._staged is None or self._plan is None:
            return
        with self._on_disk():
            path = str(self._staged.publish(self._assets))
        self._pause(self._version, self._plan)
        self._engines.each(lambda engine: engine.update_weights_from_disk(path, weight_version=self._version))
        self._compare()
        if not self._keeps_files:
            with self._on_disk():
                remove_others(self._root, int(self._version))
        self._staged = None

    def _join(self) -> None:
        """
        Raises:
            RuntimeError: the directory cannot be written.
        """
        if self._engines.endpoints:
            with self._on_disk():
                self._root.mkdir(parents=True, exist_ok=True)

    def _leave(self) -> None:
        self._staged = None

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(
                f"--update-weight-disk-dir {self._root}: {error} (wanted: a directory that can be written, "
                "with room for two versions of the weights)"
            ) from error


class StagedVersion:
    """A version that is being written: a Hugging Face checkpoint that gets its name when it is complete.

    Beside the weights it has ``manifest.json``: shape, dtype, file and xxh3 checksum of each tensor. What a
    killed writer has left of the same version is removed.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, root: Path, version: int) -> None:
        self._version = version
        self._final = root / f"weight_v{version:06d}"
        self._partial = root / f".{self._final.name}.partial"
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._tensors: dict[str, dict[str, object]] = {}
        self._files = 0
        self._bytes = 0

    def write(self, bucket: NamedTensors) -> int:
        """Writes a file with these tensors; returns their bytes."""
        self._files += 1
        file = self._partial / f"model-{self._files:05d}.safetensors"
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket}
        with SafetensorFile(file, specs) as out:
            for name, tensor in bucket:
                data = tensor.detach().cpu().contiguous()
                out.write(name, data)
                self._tensors[name] = {
                    "shape": list(data.shape),
                    "dtype": str(data.dtype).removeprefix("torch."),
                    "file": file.name,
                    "xxh3_128": xxhash.xxh3_128_hexdigest(bytes_of(data)),
                }
        size = sum(tensor.nbytes for _, tensor in bucket)
        self._bytes += size
        return size

    def publish(self, assets: Path) -> Path:
        """Completes the checkpoint, reads it once and gives it its name.

        Args:
            assets: the checkpoint directory whose config and tokenizer belong to the weights.

        Raises:
            ValueError: see `verify`.
        """
        copy_assets(assets, self._partial)
        weight_map = {name: entry["file"] for name, entry in self._tensors.items()}
        _write_json(
            self._partial / INDEX, {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
        )
        _write_json(self._partial / MANIFEST, {"version": str(self._version), "tensors": self._tensors})
        verify(self._partial)
        if self._final.exists():  # of an earlier run
            shutil.rmtree(self._final)
        self._partial.rename(self._final)
        return self._final


def remove_others(root: Path, version: int) -> None:
    """Removes all versions but one, and what killed writers have left of others.

    Later ones are of a run that went further than the checkpoint from which this one goes on.
    """
    for path in root.iterdir():
        match = _VERSION.fullmatch(path.name)
        if match and int(match[1]) != version:
            shutil.rmtree(path)


def verify(version: Path) -> None:
    """Reads a version and holds it against its manifest.

    Raises:
        ValueError: a file cannot be read, or a tensor is another than was written; it is named.
    """
    tensors = json.loads((version / MANIFEST).read_bytes())["tensors"]
    with SafetensorReader(version) as reader:
        for name, entry in tensors.items():
            found = xxhash.xxh3_128_hexdigest(bytes_of(reader.read(name).contiguous()))
            if found != entry["xxh3_128"]:
                wanted = entry["xxh3_128"]
                raise ValueError(
                    f"{version}: {name}: xxh3 {found} is read (wanted: {wanted}, as was written)"
                )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
