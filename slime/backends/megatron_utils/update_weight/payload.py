"""The form in which a bucket is handed to an engine on the same host."""

from typing import Any

import torch

from slime.backends.megatron_utils.update_weight.hf_weight_iterator import NamedTensors
from slime.utils.accelerator import has_gpu
from slime.utils.tensor_bucket import FlattenedTensorBucket, serialize_tensors


def serialize_bucket(bucket: NamedTensors) -> tuple[str, torch.Tensor]:
    """(base64 text with a handle, the flat tensor behind it, which must live until the engine has answered).

    On GPUs a CUDA IPC handle in the classes that SGLang's unpickler allows; else a shared-memory file.
    """
    if has_gpu():
        return _cuda_ipc(bucket)
    flat = FlattenedTensorBucket(named_tensors=bucket)
    return serialize_tensors(_content(flat)), flat.flattened_tensor


def _cuda_ipc(bucket: NamedTensors) -> tuple[str, torch.Tensor]:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket as SGLangBucket

    flat = SGLangBucket(named_tensors=bucket)
    return MultiprocessingSerializer.serialize(_content(flat), output_str=True), flat.flattened_tensor


def _content(flat: Any) -> dict[str, Any]:
    return {"flattened_tensor": flat.flattened_tensor, "metadata": flat.metadata}
