"""The gated delta rule in chunks is that of the paper, token by token, within each segment."""

import pytest
import torch

from slime.training.packed_layout import PackedLayout
from slime_plugins.models.delta_rule import gated_delta_rule

# Below, at and above the length of a chunk, and of several.
LENGTHS = [1, 64, 65, 7, 150]


def inputs(dtype=torch.float32):
    """query, key, value, log-decay and strength of 2 key heads and 4 heads."""
    generator = torch.Generator().manual_seed(3)
    rows = sum(LENGTHS)
    shapes = ((rows, 2, 6), (rows, 2, 6), (rows, 4, 5), (rows, 4), (rows, 4))
    query, key, value, decay, strength = (torch.randn(shape, generator=generator) for shape in shapes)
    found = query, key, value, -torch.nn.functional.softplus(decay), strength.sigmoid()
    return [x.to(dtype).requires_grad_() for x in found]


def token_by_token(query, key, value, log_decay, strength):
    """Equation 10 of arXiv:2412.06464, for one head and one segment."""
    state, read = value.new_zeros(key.size(-1), value.size(-1)), []
    for q, k, v, g, b in zip(query, key, value, log_decay, strength, strict=True):
        q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
        state = g.exp() * (state - b * torch.outer(k, k @ state)) + b * torch.outer(k, v)
        read.append(q @ state / key.size(-1) ** 0.5)
    return torch.stack(read)


def reference(query, key, value, log_decay, strength):
    heads = []
    for head in range(4):
        parts = (
            query[:, head // 2],
            key[:, head // 2],
            value[:, head],
            log_decay[:, head],
            strength[:, head],
        )
        segments = zip(*(part.split(LENGTHS) for part in parts), strict=True)
        heads.append(torch.cat([token_by_token(*segment) for segment in segments]))
    return torch.stack(heads, dim=1)


def test_chunks_give_what_tokens_one_by_one_give_and_the_same_gradients():
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    layout = PackedLayout.from_boundaries(boundaries, torch.device("cpu"))
    ours, theirs = inputs(), inputs(torch.float64)
    found, expected = gated_delta_rule(*ours, layout), reference(*theirs)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert other.grad.abs().max() > 0.1
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_has_the_values_dtype(dtype):
    layout = PackedLayout.from_boundaries([0, sum(LENGTHS)], torch.device("cpu"))
    assert gated_delta_rule(*inputs(dtype), layout).dtype == dtype
