"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464, eq. 10) over packed sequences, in chunks."""

from typing import Any

import torch
import torch.nn.functional as F

from slime.training.packed_layout import PackedLayout

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:  # flash-linear-attention has kernels for GPUs only
    chunk_gated_delta_rule = None

_CHUNK = 64
_EPSILON = 1e-6


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    layout: PackedLayout,
) -> torch.Tensor:
    """What each token reads of a state that its own segment's tokens have written.

    A state S [K, V] of a head starts at zero with each segment. A token with key k, value v, decay
    a = exp(log_decay) and strength b makes S' = a S + b k (v - a S^T k)^T of it and reads S'^T q / sqrt(K),
    its query q and its key having been scaled to length 1.

    Args:
        query, key: [rows, key heads, K].
        value: [rows, heads, V]; heads that follow each other share a key head.
        log_decay: [rows, heads] float32, at most 0.
        strength: [rows, heads], 0 to 1.
        layout: where the segments are, whose rows are all here.

    Returns:
        [rows, heads, V] in the dtype of ``value``.
    """
    ratio = value.size(1) // key.size(1)
    query, key = (_of_length_one(x).repeat_interleave(ratio, 1) for x in (query, key))
    if chunk_gated_delta_rule is not None and value.is_cuda:
        return _by_kernel(query, key, value, log_decay, strength, layout)
    outputs = []
    for group in layout.groups:
        shape = group.segments, group.length
        rows = (x.index_select(0, group.rows).unflatten(0, shape) for x in (query, key, value))
        gates = (x.index_select(0, group.rows).unflatten(0, shape) for x in (log_decay, strength))
        outputs.append(_chunked(*rows, *gates).flatten(0, 1))
    joined = torch.cat(outputs)
    return (joined if layout.order is None else joined.index_select(0, layout.order)).type_as(value)


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    layout: PackedLayout,
) -> torch.Tensor:
    assert chunk_gated_delta_rule is not None
    query, key, strength = (x.type_as(value) for x in (query, key, strength))
    batch: list[Any] = [x[None].contiguous() for x in (query, key, value, log_decay, strength)]
    boundaries = layout.varlen.queries.long()
    out, _ = chunk_gated_delta_rule(*batch, cu_seqlens=boundaries)
    result: torch.Tensor = out[0]
    return result


def _chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
) -> torch.Tensor:
    """The rule for right-padded segments [segments, length, heads, ...], in float32 (section 3.3).

    Within a chunk all tokens' writes follow from one triangular system each, so that only the chunks are
    computed one after the other.
    """
    length, size = value.size(1), min(_CHUNK, value.size(1))
    parts = (query * query.size(-1) ** -0.5, key, value, log_decay[..., None], strength[..., None])
    q, k, v, g, b = (_in_chunks(x.float(), size) for x in parts)
    total = g.cumsum(-2)  # [segments, heads, chunks, size, 1], the decay since the chunk's start
    pairs = total - total.transpose(-1, -2)  # from the column's token to the row's
    later = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    decay = pairs.masked_fill(later, float("-inf")).exp()
    system = (b * k) @ k.transpose(-1, -2) * decay
    sides = torch.cat([b * v, b * k * total.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, read = solved.split([v.size(-1), k.size(-1)], dim=-1)
    inner = q @ k.transpose(-1, -2) * decay
    q = q * total.exp()
    end = total[..., -1:, :]
    k = k * (end - total).exp()
    state = k.new_zeros(*k.shape[:2], k.size(-1), v.size(-1))
    outputs = []
    for chunk in range(k.size(2)):
        new = written[:, :, chunk] - read[:, :, chunk] @ state
        outputs.append(q[:, :, chunk] @ state + inner[:, :, chunk] @ new)
        state = state * end[:, :, chunk].exp() + k[:, :, chunk].transpose(-1, -2) @ new
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2)


def _in_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[segments, length, heads, width] to [segments, heads, chunks, size, width], zeros at the end."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.size(1) % size))
    return padded.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)
