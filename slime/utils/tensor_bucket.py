"""Named tensors as one flat buffer, and as text for a JSON body.

The pickles are those of SGLang's ``/update_weights_from_tensor``; reading goes through an allow-list
that holds what tensors are made of and nothing that runs code.
"""

import base64
import binascii
import copyreg
import hashlib
import io
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, TypeVar

import torch
import torch.multiprocessing as torch_mp
from torch.multiprocessing import reductions

T = TypeVar("T")
_MANAGER_IS_LATE = "Shared memory manager connection has timed out"
_MANAGER_TIMEOUT_S = 120.0
_KNOWN_LAYOUTS = 1024
Span = tuple[str, torch.Size, torch.dtype, int, int, int]
"""The values of a `FlattenedTensorMetadata`."""


@dataclass
class FlattenedTensorMetadata:
    """The place of a tensor in the buffer; ``start_idx`` and ``end_idx`` are byte offsets."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class FlattenedTensorBucket:
    """Tensors of any dtypes back to back in one uint8 tensor."""

    def __init__(
        self,
        named_tensors: Sequence[tuple[str, torch.Tensor]] | None = None,
        flattened_tensor: torch.Tensor | None = None,
        metadata: list[FlattenedTensorMetadata] | None = None,
    ) -> None:
        if named_tensors is not None:
            self.metadata = layout([(n, t.dtype, tuple(t.shape)) for n, t in named_tensors])
            pieces = [t.detach().contiguous().view(-1).view(torch.uint8) for _, t in named_tensors]
            self.flattened_tensor = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
        elif flattened_tensor is not None and metadata is not None:
            self.metadata, self.flattened_tensor = metadata, flattened_tensor
        else:
            raise ValueError("a bucket is made of named_tensors, or of flattened_tensor and metadata")

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors, as views where their alignment in the buffer allows it.

        Raises:
            ValueError: the metadata does not describe this buffer.
        """
        flat = self.flattened_tensor
        if flat.dtype != torch.uint8 or flat.dim() != 1:
            raise ValueError(f"bucket: {flat.dtype} of shape {list(flat.shape)} (wanted: bytes in a row)")
        return [(entry.name, self._tensor(entry)) for entry in self.metadata]

    def _tensor(self, entry: FlattenedTensorMetadata) -> torch.Tensor:
        size = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        bounded = 0 <= entry.start_idx <= entry.end_idx <= self.flattened_tensor.numel()
        if not bounded or entry.end_idx - entry.start_idx != size:
            raise ValueError(
                f"bucket entry {entry.name!r}: bytes {entry.start_idx}..{entry.end_idx} of "
                f"{self.flattened_tensor.numel()} (wanted: {size} for {list(entry.shape)} {entry.dtype})"
            )
        piece = self.flattened_tensor[entry.start_idx : entry.end_idx]
        if piece.storage_offset() % entry.dtype.itemsize:
            piece = piece.clone()
        return piece.view(entry.dtype).view(entry.shape)


class FlatBuffer:
    """Flattens buckets into memory that is kept between them, and between updates.

    On the host, touching fresh pages costs ten times as much as the copy itself. With ``shared`` that memory
    is a file from the first, to which `serialize_bucket` would copy it, and which a reaper removes if this
    process is killed. Device memory is not kept: the allocator does that, and an engine may need it.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared, self._kept = shared, torch.empty(0, dtype=torch.uint8)

    def flatten(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> FlattenedTensorBucket:
        """The bucket as one uint8 tensor, which is valid until the next call."""
        entries = layout([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket])
        pieces = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
        flat = self._memory(entries[-1].end_idx, bucket[0][1].device)
        torch.cat(pieces, out=flat)
        return FlattenedTensorBucket(flattened_tensor=flat, metadata=entries)

    def _memory(self, size: int, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        if self._kept.numel() < size:
            self._kept = torch.empty(0, dtype=torch.uint8)  # or there would be both for a while
            self._kept = shared_memory(size) if self._shared else torch.empty(size, dtype=torch.uint8)
        return self._kept[:size]


def tensor_digest(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits of the bytes of a tensor."""
    # a copy, because a storage that numpy has seen can no longer be freed by resizing
    data = tensor.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """The checksum of a tensor's bytes that SGLang takes of adapters."""
    data = tensor.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()


def layout(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> list[FlattenedTensorMetadata]:
    """Metadata of tensors (name, dtype, shape) laid back to back."""
    entries, start = [], 0
    for name, dtype, shape in tensors:
        numel = torch.Size(shape).numel()
        end = start + numel * dtype.itemsize
        entries.append(FlattenedTensorMetadata(name, torch.Size(shape), dtype, start, end, numel))
        start = end
    return entries


def serialize_tensors(obj: object, share: bool = True) -> str:
    """Base64 text of tensors in containers.

    With ``share`` CPU tensors travel as the name of a shared-memory file, and those of a GPU as CUDA IPC
    handles: the reader must be on this host, with this process's numbers of GPUs, and read while the caller
    keeps ``obj`` alive. CPU tensors move to shared memory. Without it they travel by value.
    """
    if not share:
        return base64.b64encode(_pickled(obj, copyreg.dispatch_table)).decode()
    return _shared(lambda reducers: _pickled(obj, reducers))


def serialize_bucket(bucket: FlattenedTensorBucket) -> str:
    """What `serialize_tensors` makes of a bucket, fast where its layout is that of an earlier one.

    The flat tensor moves to shared memory, unless it is on a GPU.
    """
    spans = tuple((e.name, e.shape, e.dtype, e.start_idx, e.end_idx, e.numel) for e in bucket.metadata)
    return _shared(lambda reducers: _pickled_bucket(bucket.flattened_tensor, spans, reducers))


def _shared(pickled: Callable[[Mapping[type, Callable[[Any], Any]]], bytes]) -> str:
    """The text of a pickle that is made with what shares tensors."""
    previous = torch_mp.get_sharing_strategy()
    # the default strategy passes file descriptors, which only reach child processes
    torch_mp.set_sharing_strategy("file_system")
    try:
        reducers = ForkingPickler(io.BytesIO()).dispatch_table
        return base64.b64encode(_with_shared_memory(lambda: pickled(reducers))).decode()
    finally:
        torch_mp.set_sharing_strategy(previous)


def shared_memory(size: int) -> torch.Tensor:
    """Bytes in a file that other processes may map, as `serialize_tensors` names it."""
    storage = _with_shared_memory(lambda: torch.UntypedStorage._new_using_filename_cpu(size))
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def withdraw_handle(tensor: torch.Tensor) -> None:
    """Has shared memory go with its tensor again after `serialize_tensors`, where nobody will read the text.

    A reader does so itself. Without either the file stays until this process ends.
    """
    if tensor.device.type == "cpu":
        tensor.untyped_storage()._shared_decref()


def _with_shared_memory(act: Callable[[], T]) -> T:
    """Acts again where torch's manager of shared memory gave no answer within torch's one second.

    On a busy machine that is no fault of anybody's.
    """
    deadline = time.monotonic() + _MANAGER_TIMEOUT_S
    while True:
        try:
            return act()
        except RuntimeError as error:
            if _MANAGER_IS_LATE not in str(error) or time.monotonic() > deadline:
                raise


def _pickled(obj: object, reducers: Mapping[type, Callable[[Any], Any]]) -> bytes:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.DEFAULT_PROTOCOL)
    pickler.dispatch_table = reducers
    pickler.dump(obj)
    return buffer.getvalue()


def _pickled_bucket(
    flat: torch.Tensor, spans: tuple[Span, ...], reducers: Mapping[type, Callable[[Any], Any]]
) -> bytes:
    """The pickle of a bucket as a dictionary, whose metadata come first and are not pickled again."""
    head, memo = _head(spans)
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.DEFAULT_PROTOCOL)
    pickler.dispatch_table, pickler.memo = reducers, dict(memo)
    pickler.write(head)
    pickler.save("flattened_tensor")
    pickler.save(flat)
    pickler.write(pickle.SETITEMS + pickle.STOP)
    return buffer.getvalue()


@lru_cache(maxsize=_KNOWN_LAYOUTS)
def _head(spans: tuple[Span, ...]) -> tuple[bytes, dict[int, Any]]:
    """The beginning of the pickle of a bucket, and what later parts of it may refer to."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.DEFAULT_PROTOCOL)
    pickler.write(pickle.PROTO + bytes([pickle.DEFAULT_PROTOCOL]) + pickle.EMPTY_DICT + pickle.MARK)
    pickler.save("metadata")
    pickler.save([FlattenedTensorMetadata(*span) for span in spans])
    return buffer.getvalue(), pickler.memo


class _Pickler(pickle._Pickler):
    """Names the bucket's metadata as SGLang does, whose engines die of any other name."""

    write: Callable[[bytes], object]
    save: Callable[[object], None]
    memo: dict[int, Any]
    memoize: Callable[[object], None]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is not FlattenedTensorMetadata:
            vars(pickle._Pickler)["save_global"](self, obj, name)
            return
        self.write(pickle.GLOBAL + f"{_SGLANG_BUCKET}\n{obj.__name__}\n".encode())
        self.memoize(obj)


Opened = Callable[[bytes, int, Callable[[], torch.UntypedStorage]], torch.UntypedStorage]
"""What stands for shared memory of this handle and size, which the last argument has torch map."""


def deserialize_tensors(text: str, opened: Opened | None = None) -> Any:
    """Reads what ``serialize_tensors`` (or SGLang's serializer, unless it names GPUs by UUID) wrote.

    Raises:
        ValueError: not base64, not such a pickle, or one that refers to anything else than tensors.
    """
    try:
        data = base64.b64decode(text, validate=True)
        return _with_shared_memory(lambda: _Unpickler(io.BytesIO(data), opened).load())
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"serialized tensors: {error}") from error
    except Exception as error:  # a malformed pickle can raise anything
        raise ValueError(f"serialized tensors: {type(error).__name__}: {error}") from error


_ALLOWED = {
    "builtins": {"list", "dict", "tuple", "set", "frozenset", "bytearray", "complex", "slice"},
    "collections": {"OrderedDict"},
    "torch": {"Size", "Tensor", "device"},
    "torch._utils": {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch.nn.parameter": {"Parameter"},
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch.multiprocessing.reductions": {
        "rebuild_tensor",
        "rebuild_storage_filename",
        "rebuild_storage_empty",
        "rebuild_cuda_tensor",
        "rebuild_typed_storage",
        "rebuild_typed_storage_child",
    },
}
_OF_FILES = ("torch.multiprocessing.reductions", "rebuild_storage_filename")
_SGLANG_BUCKET = "sglang.srt.weight_sync.tensor_bucket"
_BUCKET_MODULES = (_SGLANG_BUCKET, "sglang.srt.model_executor.model_runner")
_READERS: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)
_STATEFUL = (FlattenedTensorMetadata, torch.Tensor, OrderedDict)


class _Unpickler(pickle._Unpickler):
    """Resolves only names from which tensors are rebuilt, and gives state to instances alone.

    In Python, because the one in C sets attributes of classes and functions too, for the whole process.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_READERS)

    def __init__(self, file: io.BytesIO, opened: Opened | None) -> None:
        super().__init__(file)
        self._opened = opened

    def _give_state(self) -> None:
        target = self.stack[-2]
        if not isinstance(target, _STATEFUL):
            raise ValueError(f"blocked state for {target!r:.60}, which is not a tensor or a bucket entry")
        _READERS[pickle.BUILD[0]](self)

    dispatch[pickle.BUILD[0]] = _give_state

    def find_class(self, module: str, name: str) -> Any:
        if module in _BUCKET_MODULES and name == "FlattenedTensorMetadata":
            return FlattenedTensorMetadata
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_from_bytes
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if (module, name) == _OF_FILES and self._opened is not None:
            return partial(_open_file, self._opened)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name.endswith("Storage"):
            return super().find_class(module, name)
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"blocked unsafe global {module}.{name}")


def _open_file(
    opened: Opened, kind: type, manager: bytes, handle: bytes, size: int, dtype: torch.dtype | None = None
) -> Any:
    """Opens shared memory as torch does; another mapping may stand for it."""
    mapped = partial(reductions.rebuild_storage_filename, kind, manager, handle, size, dtype)
    return opened(handle, size, mapped) if kind is torch.UntypedStorage and dtype is None else mapped()


def _latin1(text: str, encoding: str) -> bytes:
    """How old pickle protocols write bytes."""
    return text.encode("latin1")


def _load_from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
