"""A whole version is written in buckets of at most the bytes of ``--update-weight-buffer-size``."""

import pytest
import torch

from slime.weight_sync.versions.manifest import Link
from slime.weight_sync.versions.share import HeldShare


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([6, 6], [[6], [6]]),
        ([5, 5, 1], [[5, 5], [1]]),  # a bucket may be full
        ([4, 4, 4, 4, 4], [[4, 4], [4, 4], [4]]),
        ([11, 2, 3], [[11], [2, 3]]),  # larger than a bucket: alone
    ],
)
def test_tensors_share_a_bucket_while_they_fit(sizes, buckets):
    held = HeldShare("xor", "xxh3-128")
    held.keep([(str(at), torch.zeros(size, dtype=torch.uint8)) for at, size in enumerate(sizes)])
    held.move_on(Link(1, "state"))
    assert [[tensor.nbytes for _, tensor in bucket] for bucket in held.tensors(10)] == buckets
