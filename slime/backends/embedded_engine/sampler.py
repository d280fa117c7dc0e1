"""Draws tokens for a batch of sequences: adjusted logits, what may be drawn of them, noise, and log-probs."""

from dataclasses import dataclass, field

import numpy as np
import torch

from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import Nucleus, Sequence, TopLogprobs

_BLOCK = 128
_LOWEST = torch.finfo(torch.float32).min


@dataclass
class SampledTokens:
    """``ids`` ``[B]`` int64 on the device of the logits, and the same as Python numbers."""

    tensor: torch.Tensor
    ids: list[int]
    logprobs: list[float]
    top: dict[int, TopLogprobs]
    of_ids: dict[int, TopLogprobs]
    broken: frozenset[int] = frozenset()
    """Rows whose logits are no numbers: what else is said of them means nothing."""
    nuclei: dict[int, Nucleus] = field(default_factory=dict)


class SamplingBatch:
    """What sampling needs to know of a fixed list of sequences, gathered once.

    Log-probs follow SGLang: ``log_softmax(logits / temperature)`` after penalties and biases, before
    top-k, top-p and min-p.
    """

    def __init__(
        self, sequences: list[Sequence], stop_ids: list[frozenset[int]], device: torch.device
    ) -> None:
        params = [s.params for s in sequences]
        self._sequences = sequences
        self._stop_ids = stop_ids
        greedy = [p.greedy for p in params]
        self._greedy = torch.tensor(greedy, device=device)
        self._any_greedy, self._all_greedy = any(greedy), all(greedy)
        scales = [p.scale for p in params]
        self._scales = torch.tensor(scales, device=device)[:, None] if any(s != 1.0 for s in scales) else None
        self._filtered = [i for i, p in enumerate(params) if p.filters]
        self._adjusted = [
            i
            for i, p in enumerate(params)
            if p.penalises or p.logit_bias or p.min_new_tokens > 0 or sequences[i].constraint is not None
        ]
        self._seeds = np.array([s.noise_seed for s in sequences], dtype=np.uint64)
        options = [s.logprob_options for s in sequences]
        self._top = [i for i, o in enumerate(options) if o.wanted and o.top > 0]
        self._of_ids = [i for i, o in enumerate(options) if o.wanted and o.token_ids]
        self._nuclei = [i for i, s in enumerate(sequences) if s.needs_nuclei]

    def sample(self, logits: torch.Tensor) -> SampledTokens:
        """logits: ``[B, vocab]`` float32, overwritten."""
        for row in self._adjusted:
            adjust_logits(logits[row], self._sequences[row], self._stop_ids[row])
        if self._scales is not None:
            logits.div_(self._scales)
        peak = logits.amax(-1, keepdim=True)
        weights = torch.sub(logits, peak).exp_()
        block_sums = _block_sums(weights)
        log_total = block_sums.sum(-1).log()
        tokens = logits.argmax(-1) if self._any_greedy else None
        if not self._all_greedy:
            drawn = self._draw(weights, block_sums)
            tokens = drawn if tokens is None else torch.where(self._greedy, tokens, drawn)
        assert tokens is not None
        shift = peak[:, 0].double() + log_total
        chosen = logits.gather(1, tokens[:, None])[:, 0].double() - shift
        broken = frozenset(log_total.isnan().nonzero()[:, 0].tolist())
        ids = tokens.tolist()
        return SampledTokens(
            broken=broken,
            tensor=tokens,
            ids=ids,
            logprobs=chosen.tolist(),
            top={i: self._top_of(i, logits, shift) for i in self._top},
            of_ids={i: self._of_ids_of(i, logits, shift) for i in self._of_ids},
            # by now drawing has cut from the weights what it left out
            nuclei={i: self._nucleus(i, weights[i], ids[i]) for i in self._nuclei},
        )

    def _draw(self, weights: torch.Tensor, block_sums: torch.Tensor) -> torch.Tensor:
        """Inverse-CDF sampling in two steps, block and entry: one pass over the vocabulary."""
        if self._filtered:
            rows = torch.tensor(self._filtered, device=weights.device)
            params = [self._sequences[i].params for i in self._filtered]
            cut = cut_distribution(weights[rows], params)
            weights[rows] = cut
            block_sums[rows] = _block_sums(cut)
        # Counted from the start of the prompt: a request that goes on with an earlier response, as in the
        # next turn of a conversation, must not repeat that response's noise.
        steps = np.array([len(s.prompt_ids) + len(s.output_ids) for s in self._sequences], dtype=np.uint64)
        uniform = torch.from_numpy(uniforms(self._seeds, steps)).to(weights.device)
        blocks, rest = _invert(block_sums.cumsum(-1), uniform, relative=True)
        entries = _block_entries(weights, blocks)
        offsets, _ = _invert(entries.cumsum(-1, dtype=torch.float64), rest, relative=False)
        return (blocks * _block_size(weights) + offsets).clamp_(max=weights.shape[1] - 1)

    def _nucleus(self, row: int, weights: torch.Tensor, token: int) -> Nucleus:
        """``weights``: ``[vocab]``, 0 for what the token was not drawn among, unless it is greedy."""
        if self._sequences[row].params.greedy:
            return Nucleus(np.array([token], dtype=np.int32), 0.0)
        kept = weights.nonzero()[:, 0]
        ids = kept[weights[kept].argsort(descending=True, stable=True)]
        share = weights[token].double() / weights[ids].double().sum()
        return Nucleus(ids.to(torch.int32).cpu().numpy(), share.log().item())

    def _top_of(self, row: int, logits: torch.Tensor, shift: torch.Tensor) -> TopLogprobs:
        count = min(self._sequences[row].logprob_options.top, logits.shape[1])
        values, ids = logits[row].topk(count)
        return list(zip(_finite(values.double() - shift[row]), ids.tolist(), strict=True))

    def _of_ids_of(self, row: int, logits: torch.Tensor, shift: torch.Tensor) -> TopLogprobs:
        ids = list(self._sequences[row].logprob_options.token_ids)
        return list(zip(_finite(logits[row][ids].double() - shift[row]), ids, strict=True))


def _finite(logprobs: torch.Tensor) -> list[float]:
    """Returns log-probs with float32's lowest number for what cannot come, as SGLang tells of it."""
    return logprobs.clamp(min=_LOWEST).tolist()


def _block_size(weights: torch.Tensor) -> int:
    vocab = weights.shape[1]
    return _BLOCK if vocab % _BLOCK == 0 else vocab


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """``[B, blocks]`` float64."""
    return weights.view(len(weights), -1, _block_size(weights)).sum(-1).double()


def _block_entries(weights: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """``[B, block size]``: the block chosen in each row."""
    grouped = weights.view(len(weights), -1, _block_size(weights))
    return grouped[torch.arange(len(weights), device=weights.device), blocks]


def _invert(
    cumulative: torch.Tensor, target: torch.Tensor, relative: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index whose cumulative weight exceeds the target, and what of the target is left.

    The target stays below the total, so that rounding never lands on an entry of weight 0.
    """
    total = cumulative[:, -1]
    target = torch.minimum(target * total if relative else target, total * (1 - 1e-12))[:, None]
    index = (cumulative <= target).sum(-1, keepdim=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp_(min=0)), 0.0)
    return index[:, 0], (target - before)[:, 0]


def adjust_logits(logits: torch.Tensor, sequence: Sequence, stop_ids: frozenset[int]) -> None:
    """Applies a sequence's penalties, biases, grammar and ``min_new_tokens`` in place.

    Penalties look at response tokens only, as in SGLang.

    Args:
        logits: ``[vocab]`` float32.
        sequence: with its response so far.
        stop_ids: ids that would end it.
    """
    params = sequence.params
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = _response(sequence, logits).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if params.repetition_penalty != 1.0:
        seen = _response(sequence, logits).unique()
        values = logits[seen]
        penalised = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        logits[seen] = penalised
    for token, bias in params.logit_bias:
        logits[token] += bias
    if sequence.constraint is not None:
        sequence.constraint.restrict(logits)
    if len(sequence.output_ids) < params.min_new_tokens:
        logits[[token for token in stop_ids if token < len(logits)]] = float("-inf")


def _response(sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
    """The tokens of the response so far, int64 beside the logits."""
    return torch.tensor(sequence.output_ids, dtype=torch.int64, device=logits.device)


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


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Uniform noise as a function of a request's seed and the position of the token.

    Counter-based, so that a token's noise depends neither on the batch it is drawn in nor on how often
    its sequence was interrupted.

    Args:
        seeds: ``[B]`` uint64.
        steps: ``[B]`` uint64, positions of the tokens.

    Returns:
        ``[B]`` float64 in [0, 1).
    """
    with np.errstate(over="ignore"):
        return (_mix(_mix(seeds) + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """One step of splitmix64 (Steele, Lea and Flood 2014)."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
