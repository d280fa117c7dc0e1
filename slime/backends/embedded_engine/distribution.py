"""Top-k, top-p and min-p."""

import torch

from slime.backends.embedded_engine.sampling_params import SamplingParams

_SHORTLIST = 1024


def cut_distribution(weights: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Zeroes what the parameters exclude.

    Order and comparisons are SGLang's: an entry stays if its rank is below top_k, the mass before it
    does not exceed top_p, and its probability is at least min_p times the largest. A full sort of the
    vocabulary is avoided where the likeliest entries decide.

    Args:
        weights: ``[R, vocab]`` float32, unnormalised probabilities.
        params: of each row.

    Returns:
        ``[R, vocab]`` float32.
    """
    vocab = weights.shape[1]
    size = min(_SHORTLIST, vocab)
    cut, decided = _cut(weights, weights.topk(size), params)
    if size < vocab and not decided.all():
        # only those rows: where entries tie, a sort may choose others, and that must not depend on company
        rows = (~decided).nonzero()[:, 0]
        rest, undecided = weights[rows], [params[i] for i in rows.tolist()]
        cut[rows], _ = _cut(rest, rest.sort(stable=True, dim=-1, descending=True), undecided)
    return cut


def _cut(
    weights: torch.Tensor, ranked: tuple[torch.Tensor, torch.Tensor], params: list[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps what the parameters allow of the ``ranked`` values and ids, ``[R, size]``, and zeroes the rest.

    Returns:
        ``[R, vocab]`` float32, and ``[R]`` bool: whether nothing behind the ranked entries could stay.
    """
    values, ids = ranked
    size, device = values.shape[1], weights.device
    total = weights.double().sum(-1, keepdim=True)
    limits = [p.top_k if p.top_k > 0 else weights.shape[1] for p in params]
    top_k = torch.tensor(limits, device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    mass = values.double().cumsum(-1) / total
    keep = torch.arange(size, device=device)[None] < top_k
    keep &= (mass - values.double() / total) <= top_p
    keep &= values >= min_p * values[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, ids, values * keep), ~keep[:, -1]
