"""megatron-core runs on the CPU, and other users of torch notice nothing."""

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the module does nothing with CUDA"),
]


def _run(code):
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_megatron_modules_see_the_proxy_and_everyone_else_the_real_torch():
    _run(
        """
import slime.backends.megatron_utils
import torch
import megatron.core.optimizer as optimizer
import megatron.core.optimizer.distrib_optimizer as distributed
from megatron.core import utils
from megatron.core.fusions.fused_bias_swiglu import swiglu
from slime.backends.megatron_utils.fused_adam import FusedAdam
assert "wandb" not in __import__("sys").modules
assert utils.torch is not torch
assert utils.torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
assert utils.torch.tensor([1], device=torch.cuda.current_device()).device.type == "cpu"
assert optimizer.Adam is distributed.Adam is FusedAdam
assert not optimizer.USING_PYTORCH_OPTIMIZER and distributed.HAVE_APEX_OR_TE
assert not hasattr(swiglu, "_torchdynamo_orig_callable")
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    pass
else:
    raise SystemExit("the real torch was changed")
# Dynamo, which transformers imports, is particular about torch.cuda's functions.
import torch._dynamo
from torch._dynamo.trace_rules import get_torch_obj_rule_map
get_torch_obj_rule_map()
"""
    )


def test_modules_imported_before_are_treated_too():
    _run(
        """
import torch
import megatron.core.optimizer as optimizer
from megatron.core import utils
from megatron.core.fusions.fused_bias_swiglu import swiglu as early
import slime.backends.megatron_utils
from megatron.core.fusions import fused_bias_swiglu
assert hasattr(early, "_torchdynamo_orig_callable")
assert not hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable")
assert utils.torch is not torch
assert optimizer.Adam.__name__ == "FusedAdam"
"""
    )


def test_type_names_equal_their_cuda_spelling():
    from slime.backends.megatron_utils import cpu_support

    cpu_support.prepare()
    name = torch.zeros(1).type()
    assert name == "torch.FloatTensor" == name
    assert name == "torch.cuda.FloatTensor"
    assert name in ["torch.cuda.FloatTensor"]
    assert name != "torch.cuda.HalfTensor"
    assert str(name) == "torch.FloatTensor"


def test_what_stands_in_for_a_gpu_has_done_its_work_and_holds_nothing():
    from slime.backends.megatron_utils import cpu_support

    cpu_support.prepare()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    assert stream.query() and event.query() and event.elapsed_time(event) == 0
    assert stream.record_event(event) is event and stream.record_event().query()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() == stream != event
    assert len({stream, torch.cuda.Stream()}) == 1
    held = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    held += [torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()]
    assert held == [0] * 4
    tensor = torch.zeros(1)
    assert tensor.cuda() is tensor.pin_memory() is tensor and torch.cuda.current_device().type == "cpu"


def test_random_numbers_of_the_gpu_are_those_of_the_cpu():
    from slime.backends.megatron_utils import cpu_support

    cpu_support.prepare()
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), drawn)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), drawn)


def test_factories_of_megatron_make_tensors_on_the_cpu():
    from slime.backends.megatron_utils import cpu_support

    proxy = cpu_support._torch_proxy()
    for device in (0, "cuda", "cuda:1", torch.device("cuda", 0), "cpu", None):
        assert proxy.zeros(2, device=device, pin_memory=True).device.type == "cpu"
    assert proxy.empty(2, device="meta").device.type == "meta"
    assert (proxy.autocast("cuda").device, proxy.autocast("cpu").device) == ("cpu", "cpu")
    assert proxy.Tensor is torch.Tensor
