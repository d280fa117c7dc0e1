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
