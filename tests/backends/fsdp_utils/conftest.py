"""What one start of two ranks tells of an architecture, for the tests of several files."""

import pytest
import torch
import torch.distributed as dist

from tests.announced import announced
from tests.backends.fsdp_utils.architectures import load, model_args, packed_row, save
from tests.megatron_harness import run_ranks

BUCKET = 20_000


def _compute(rank, path):
    from slime.backends.fsdp_utils.forward import PackedForward
    from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors

    model = load(model_args(path))
    forward = PackedForward(model, "flash_attention_2", torch.device("cpu"))
    forward.choose()
    with torch.no_grad():
        logits = forward(packed_row()).clone()
    buckets = [
        [(name, tensor.clone()) for name, tensor in bucket]
        for bucket in announced(FsdpHfTensors(model, torch.float32), BUCKET)
    ]
    found = {"logits": logits, "packed": forward.way == "packed", "buckets": buckets}
    return {**found, "in_parts": _in_parts(rank, model)}


def _in_parts(rank, model):
    """This rank's logits of the packed row if two ranks share its sequences; or why that is refused."""
    from slime.backends.fsdp_utils.forward import PackedForward
    from slime.training.parallel import ParallelContext

    context = ParallelContext(cp_group=dist.group.WORLD, cp_rank=rank, cp_size=2)
    forward = PackedForward(model, "flash_attention_2", torch.device("cpu"), context)
    try:
        forward.choose()
    except ValueError as error:
        return {"refused": str(error)}
    row = packed_row(context)
    with torch.no_grad():
        return {"logits": forward(row)[0].clone(), "rows": row.split.rows}


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


@pytest.fixture(scope="module")
def process_group():
    """Makes a process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
