"""A whole version is written in buckets of at most the bytes of ``--update-weight-buffer-size``."""

import pytest
import torch

from slime.config.run import run_config
from slime.weight_sync.transports.delta import DeltaTransport
from slime.weight_sync.versions.codec import bytes_in
from slime.weight_sync.versions.manifest import Entry
from tests.run_args import run_args


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
    transport = DeltaTransport(run_config(run_args(update_weight_buffer_size=10)))
    for at, size in enumerate(sizes):
        transport._entries[str(at)] = Entry((size,), "uint8", "", "")
        transport._held[str(at)] = bytes_in(torch.zeros(size, dtype=torch.uint8))
    assert [[tensor.nbytes for _, tensor in bucket] for bucket in transport._buckets()] == buckets
