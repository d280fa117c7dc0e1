"""The form in which a bucket is handed to an engine on the same host."""

from typing import Any

from slime.utils.accelerator import has_gpu
from slime.utils.tensor_bucket import FlattenedTensorBucket, serialize_tensors


def serialize_bucket(bucket: FlattenedTensorBucket) -> str:
    """Base64 text with a handle to the flat tensor, which must not change until the engine has answered.

    On GPUs a CUDA IPC handle, in the classes that SGLang's unpickler allows; else a shared-memory file, to
    which the flat tensor moves when it is first serialised.
    """
    if has_gpu():
        return _cuda_ipc(bucket)
    return serialize_tensors({"flattened_tensor": bucket.flattened_tensor, "metadata": bucket.metadata})


def _cuda_ipc(bucket: FlattenedTensorBucket) -> str:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata: list[Any] = [FlattenedTensorMetadata(**vars(entry)) for entry in bucket.metadata]
    content = {"flattened_tensor": bucket.flattened_tensor, "metadata": metadata}
    return MultiprocessingSerializer.serialize(content, output_str=True)
