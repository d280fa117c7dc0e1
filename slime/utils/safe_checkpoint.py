"""Reading torch.distributed's checkpoints without running what stands in them.

A checkpoint is a directory that somebody may have been given. torch unpickles its ``.metadata`` and its
objects (random state) as they are; here only names of which metadata consists are resolved.
"""

import io
import pickle
import types
from enum import Enum
from typing import Any, BinaryIO, ClassVar

import torch
import torch.distributed.checkpoint.default_planner as torch_planner
import torch.distributed.checkpoint.filesystem as torch_filesystem
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.planner import ReadItem

_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    "builtins": {"set", "frozenset"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_CHECKPOINT}.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    f"{_CHECKPOINT}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}


class _Unpickler(pickle._Unpickler):
    """Resolves only names of which metadata consists, and changes nothing but what it has made itself.

    In Python, because C's offers no way to refuse a BUILD that would change a class for the whole process.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"refused {module}.{name}, which no metadata consists of")

    def load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, Enum) or not type(target).__module__.startswith(_CHECKPOINT):
            raise pickle.UnpicklingError(f"refused to change {target!r}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def load_metadata(file: BinaryIO) -> Any:
    """What a checkpoint's ``.metadata`` holds.

    Raises:
        ValueError: it is not such a pickle, or it refers to something else.
    """
    try:
        return _Unpickler(file).load()
    except Exception as error:  # a malformed pickle can raise anything
        where = getattr(file, "name", "metadata")
        raise ValueError(f"{where}: not a checkpoint's metadata ({type(error).__name__}: {error})") from error


def _load_bytes(planner: torch_planner.DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Takes the place of ``DefaultLoadPlanner.load_bytes``, which lets torch.load run what it reads."""
    name, content = read_item.dest_index.fqn, torch.load(value, weights_only=True)
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], content)
    else:
        planner.state_dict[name] = content


class _SafePickle(types.ModuleType):
    """``pickle`` as torch's reader and writer of checkpoints see it."""

    load = staticmethod(load_metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


def install() -> None:
    """Makes torch and megatron-core read checkpoints in this way, in the whole process."""
    vars(torch_filesystem)["pickle"] = _SafePickle("pickle")
    torch_planner.DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore
