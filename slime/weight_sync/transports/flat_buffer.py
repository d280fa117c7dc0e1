"""Memory into which buckets are flattened one after the other."""

import torch

from slime.training.weights import NamedTensors
from slime.utils.tensor_bucket import FlattenedTensorBucket, layout


class FlatBuffer:
    """Flattens buckets into memory that is kept between them, and between updates.

    On the host, touching fresh pages costs ten times as much as the copy itself. Once shared with an engine
    that memory is a file, which a reaper removes if this process is killed. Device memory is not
    kept: there the allocator does that, and an engine on the same device may need it.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def flatten(self, bucket: NamedTensors) -> FlattenedTensorBucket:
        """The bucket as one uint8 tensor, which is valid until the next call."""
        entries = layout([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket])
        size, device = entries[-1].end_idx, bucket[0][1].device
        pieces = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
        memory = self._kept
        if memory.device != device or memory.numel() < size:
            memory = torch.empty(size, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._kept = memory
        torch.cat(pieces, out=memory[:size])
        return FlattenedTensorBucket(flattened_tensor=memory[:size], metadata=entries)
