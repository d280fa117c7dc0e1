"""What one start of two ranks tells of an architecture, for the tests of several files."""

import pytest
import torch

from tests.backends.fsdp_utils.architectures import load, model_args, packed_row, save
from tests.megatron_harness import run_ranks

BUCKET = 20_000


def _compute(rank, path):
    from slime.backends.fsdp_utils.forward import PackedForward
    from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors

    model = load(model_args(path))
    forward = PackedForward(model, "flash_attention_2", torch.float32)
    forward.choose()
    with torch.no_grad():
        logits = forward(packed_row()).clone()
    buckets = [
        [(name, tensor.clone()) for name, tensor in bucket]
        for bucket in FsdpHfTensors(model, torch.float32).buckets(BUCKET)
    ]
    return {"logits": logits, "packed": forward.packed, "buckets": buckets}


@pytest.fixture(scope="session")
def computed(tmp_path_factory):
    """``computed(architecture)``: the path of a model of it, and what each of two ranks found."""
    outcomes = {}

    def outcome(architecture):
        if architecture not in outcomes:
            path = save(tmp_path_factory.mktemp(architecture), architecture)
            outcomes[architecture] = path, run_ranks(_compute, 2, path)
        return outcomes[architecture]

    return outcome
