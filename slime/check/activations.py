"""The most that a rank keeps for backward passes at a time, and the logits beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from slime.check.kernels import CUDA, Kernels
from slime.check.layer_activations import Rank, Saved, angles, recomputed, saved_by_layer
from slime.check.layout import Layout
from slime.config.batches import BatchConfig
from slime.config.memory import MemoryConfig
from slime.config.rollout import RolloutConfig
from slime.config.trainers import trainer_of
from slime.models import family_of
from slime.models.mtp import trained_mtp_layers

_FLOAT32 = 4


@dataclass(frozen=True)
class Activations:
    """Bytes.

    Attributes:
        kept: of all micro-batches that wait for their backward passes, when the last one's begins.
        logits: of that one, with their gradient.
        recomputing: all at the worst moment after that, when layers are being computed again.
    """

    kept: float
    logits: float
    recomputing: float

    @property
    def peak(self) -> float:
        return max(self.kept + self.logits, self.recomputing)


def not_estimated(config: MemoryConfig) -> str:
    """Whose activations are not estimated; empty if they are."""
    trainer = trainer_of(config.trainer)
    if trainer.transformers_model:
        return f"with --train-backend {trainer.name}"
    family = family_of(config.model.model_type)
    return "" if family.estimated else f"for {family.attention}"


def activations(
    config: MemoryConfig,
    layout: Layout,
    stage: int,
    tokens: int,
    role: str = "actor",
    kernels: Kernels = CUDA,
) -> Activations:
    """Counts the activations of a rank of this stage for micro-batches of so many tokens."""
    longest = tokens * layout.cp
    rank = Rank(config, layout, kernels, min(longest, longest_sample(config.rollout) or longest))
    chunks = [_chunk(rank, layers) for layers in layout.stages[stage]]
    last = stage == layout.pp - 1
    each = sum(kept for kept, _ in chunks) / len(chunks) + angles(rank)
    waiting = _waiting(config, layout, stage)
    kept = each * waiting + (_head(rank) if last else 0.0)
    vocabulary = config.model.padded_vocab_size / layout.tp
    # A user's loss is given a copy of its own.
    size = _FLOAT32 if config.loss.loss_type == "custom_loss" else rank.size
    logits = 2 * size * vocabulary if last and role != "critic" else 0.0
    again = each * (waiting - 1) + angles(rank) + max(again for _, again in chunks)
    copy = 0
    if last and role != "critic" and (further := trained_mtp_layers(config.mtp)):
        # Each has logits of its own, in the model's format. All is gone before the decoder's backward pass.
        whole, left = _mtp_layer(rank)
        kept += further * (left + rank.size * vocabulary)
        if whole > left:
            again = max(again, kept + (size - rank.size) * vocabulary + whole - left)
        if layout.pp > 1 and config.model.untie_embeddings_and_output_weights:
            copy = config.model.hidden_size * rank.size * int(vocabulary)  # of the embedding
    return Activations(tokens * kept + copy, tokens * logits, tokens * again + copy)


def _mtp_layer(rank: Rank) -> tuple[float, float]:
    """What a MTP layer keeps per token, and what of it when parts are computed again."""
    config, layer = rank.config, rank.model.num_layers - 1
    row = config.model.hidden_size * rank.size
    # Inputs of its three norms, and of the projection of two of them.
    own = rank.share * (3 * (row + rank.kernels.norm(1, config.model.hidden_size, rank.size)) + 2 * row)
    inner = saved_by_layer(rank, layer)
    whole = own + inner.total
    if config.megatron.recompute_granularity == "full":
        return whole, rank.share * 2 * row
    if config.megatron.recompute_granularity == "selective":
        experts = bool(config.model.num_experts and config.model.moe_layer_freq[layer])
        return whole, own + recomputed(rank, inner, experts).total
    return whole, whole


def _head(rank: Rank) -> float:
    """The final norm's input and output, per token."""
    hidden, share = rank.model.hidden_size, rank.share
    return share * (2 * hidden * rank.size + rank.kernels.norm(1, hidden, rank.size))


def _chunk(rank: Rank, layers: Sequence[int]) -> tuple[float, float]:
    """Bytes per token that the layers of a chunk keep, and the most of them while some are computed again."""
    config = rank.config
    whole = [saved_by_layer(rank, layer) for layer in layers]
    kind = config.megatron.recompute_granularity
    if kind is None:
        return sum(kept.total for kept in whole), 0.0
    if kind == "selective":
        kinds = [bool(config.model.num_experts and config.model.moe_layer_freq[layer]) for layer in layers]
        rest = [recomputed(rank, kept, experts) for kept, experts in zip(whole, kinds, strict=True)]
        again = [_again_of_layer(kept, left) for kept, left in zip(whole, rest, strict=True)]
        saved_in_all = sum(left.total for left in rest)
        return saved_in_all, saved_in_all + max(again, default=0.0)
    return _full(rank, [kept.total for kept in whole])


def _again_of_layer(kept: Saved, left: Saved) -> float:
    """What a layer has more while it is computed again; its MLP is done when attention is."""
    norms = kept.inputs + kept.normed - left.inputs - left.normed
    return norms + max(kept.mlp - left.mlp, kept.core - left.core - left.mlp)


def _full(rank: Rank, totals: Sequence[float]) -> tuple[float, float]:
    """Groups of layers keep their input alone (uniform), or so does each of the first ones (block)."""
    config, count = rank.config, rank.config.megatron.recompute_num_layers or len(totals)
    spread = rank.layout.tp if config.megatron.distribute_saved_activations else 1
    whole = rank.share * config.model.hidden_size * rank.size
    boundary = whole / spread
    if config.megatron.recompute_method == "uniform":
        groups = [sum(totals[at : at + count]) for at in range(0, len(totals), count)]
        inputs = len(groups) * boundary
        return inputs, inputs + _again(groups, whole)
    # The layers behind them are done when these are computed again.
    inputs = len(totals[:count]) * boundary
    return inputs + sum(totals[count:]), inputs + _again(totals[:count], whole)


def _again(groups: Sequence[float], inputs: float) -> float:
    """What the largest group adds to its input, which is there already."""
    return max(groups, default=inputs) - inputs


def _waiting(config: MemoryConfig, layout: Layout, stage: int) -> int:
    """Micro-batches, of one chunk each, that wait at most (Narayanan et al. 2021, sections 2.2.1, 2.2.2)."""
    before_last = layout.pp - 1 - stage
    most = 2 * before_last + (layout.vpp - 1) * layout.pp + 1 if layout.vpp > 1 else before_last + 1
    batches = micro_batches(config.batches, layout)
    return most if batches is None else min(most, batches * layout.vpp)


def micro_batches(config: BatchConfig, layout: Layout) -> int | None:
    """Returns the micro-batches of an optimizer step on each rank; None where tokens decide."""
    if config.use_dynamic_batch_size:
        return None
    return config.global_batch_size // (layout.dp * config.micro_batch_size)


def micro_batch_tokens(config: MemoryConfig, layout: Layout) -> int | None:
    """Returns the most tokens that a micro-batch has on a rank; None where no flag says."""
    if config.batches.use_dynamic_batch_size:
        return config.batches.max_tokens_per_gpu
    longest = longest_sample(config.rollout)
    return None if longest is None else -(-longest * config.batches.micro_batch_size // layout.cp)


def longest_sample(config: RolloutConfig) -> int | None:
    """Tokens of prompt and response; None where no flag says."""
    if config.rollout_max_context_len is not None:
        return config.rollout_max_context_len
    parts = (config.rollout_max_prompt_len, config.rollout_max_response_len)
    return None if None in parts else sum(part or 0 for part in parts)
