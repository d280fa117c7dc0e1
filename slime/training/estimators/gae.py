"""Generalised advantage estimation (arXiv 1506.02438, eq. 16), one token after the other and in chunks.

With delta_t = r_t + gamma * V_(t+1) - V_t, the value after the end being 0:

    A_t = delta_t + gamma * lambd * A_(t+1)        returns_t = A_t + V_t

Rewards and values are [B, T] in one floating-point type; so are the results.
"""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

Pair = tuple[torch.Tensor, torch.Tensor]
"""Advantages and returns."""

# Elements of rewards that are worked on at a time: with their values and results they fit a CPU's cache.
_BLOCK_ELEMENTS = 1 << 18


def get_advantages_and_returns(
    total_len: int,
    response_len: int,
    values: torch.Tensor,
    rewards: torch.Tensor,
    gamma: float,
    lambd: float,
) -> Pair:
    """Computes advantages and returns of a single response; values, rewards: [R].

    Args:
        total_len: tokens of prompt and response, for the sake of callers that pass it.
        response_len: R.
    """
    (advantages,), (returns,) = get_advantages_and_returns_batch(
        [total_len], [response_len], [values], [rewards], gamma, lambd
    )
    return advantages, returns


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[torch.Tensor],
    rewards_list: Sequence[torch.Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Advantages and returns of responses of several lengths.

    Args:
        total_lengths: of prompt and response, for the sake of callers that pass it.
        response_lengths: R of each.
        values_list, rewards_list: per response [R].
        chunked: `chunked_gae`, else `vanilla_gae`.

    Returns:
        Per response [R] each, without gradients.
    """
    if not values_list:
        return [], []
    # Padding changes nothing before it: without rewards and values its advantages are 0.
    values, rewards = (pad_sequence(list(rows), batch_first=True) for rows in (values_list, rewards_list))
    results = (chunked_gae if chunked else vanilla_gae)(rewards, values, gamma, lambd)
    advantages, returns = (
        [row[:length] for row, length in zip(result, response_lengths, strict=True)] for result in results
    )
    return advantages, returns


@torch.no_grad()
def vanilla_gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float) -> Pair:
    """The recursion as it is written, from the last token to the first."""
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lambd * next_advantage
        advantages[:, t] = next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


@torch.no_grad()
def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 32
) -> Pair:
    """Computes GAE by `chunked_discounted_returns`: as many steps as there are chunks of chunks."""
    advantages, returns = rewards.new_empty(rewards.shape), rewards.new_empty(rewards.shape)
    rows = max(1, _BLOCK_ELEMENTS // max(rewards.size(1), 1))
    blocks = zip(*(x.split(rows) for x in (rewards, values, advantages, returns)), strict=True)
    for reward, value, advantage, result in blocks:
        delta = torch.sub(reward, value, out=result)
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        _discount(delta, gamma * lambd, chunk_size, advantage)
        torch.add(advantage, value, out=result)
    return advantages, returns


def chunked_discounted_returns(rewards: torch.Tensor, discount: float, chunk_size: int = 32) -> torch.Tensor:
    """G_t = r_t + discount * G_(t+1) along the last axis; rewards: [B, T]."""
    copy = rewards.clone(memory_format=torch.contiguous_format)
    return _discount(copy, discount, chunk_size, torch.empty_like(copy))


def _discount(x: torch.Tensor, discount: float, size: int, out: torch.Tensor) -> torch.Tensor:
    """Discounts into ``out``; ``x`` is written over.

    The first value of a chunk follows from the sum of its own x and from the first value of the next, which
    is the same recursion over chunks, with the discount of a whole one. What comes from the next chunk is
    added to the last x of each; then the values within are a product with the powers of the discount.
    """
    batch, length = x.shape
    if length <= 1:
        return out.copy_(x)
    size = min(size, length)
    if length % size:
        x = torch.nn.functional.pad(x, (0, -length % size))
    chunks = x.reshape(-1, size)
    powers = _powers(discount, size, x)
    if len(chunks) > batch:
        sums = (chunks @ powers[:, 0]).view(batch, -1)[:, 1:].contiguous()
        following = _discount(sums, discount**size, size, torch.empty_like(sums))
        chunks.view(batch, -1, size)[:, :-1, -1].add_(following, alpha=discount)
    if length % size:
        return out.copy_((chunks @ powers).view(batch, -1)[:, :length])
    torch.mm(chunks, powers, out=out.view(-1, size))
    return out


def _powers(discount: float, size: int, like: torch.Tensor) -> torch.Tensor:
    """[size, size] in the type of ``like``: discount^(s - t) at (s, t) for s >= t, else 0; 0^0 is 1."""
    steps = torch.arange(size, device=like.device)
    exponents = steps[:, None] - steps
    base = torch.tensor(discount, dtype=torch.float64, device=like.device)
    return torch.pow(base, exponents.clamp(min=0)).to(like.dtype).masked_fill_(exponents < 0, 0)
