"""Trajectories of the rollout buffer and samples, made of each other."""

from functools import cache
from typing import Any

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.store import Item


def sample_of(item: Item, tokenizer: Any, mask_type: str, group_index: int | None = None) -> Sample:
    """The tokens, masks, log-probs and versions that the trajectory brings; else tokens of its messages.

    Args:
        tokenizer: for messages without tokens, and for the text of a response.
        mask_type: as ``--loss-mask-type``, for messages without tokens.
    """
    tokens, length, mask = item.get("tokens"), item.get("response_length"), item.get("loss_mask")
    if tokens is None:
        tokens, length, mask = _tokenized(item["messages"], tokenizer, mask_type)
    spans = [(version, count) for version, count in item.get("version_spans") or ()]
    return Sample(
        group_index=group_index,
        prompt=item["messages"],
        tokens=tokens,
        response=tokenizer.decode(tokens[len(tokens) - length :]),
        response_length=length,
        loss_mask=mask,
        rollout_log_probs=item.get("rollout_log_probs"),
        version_spans=spans,
        weight_versions=[version for version, _ in spans if version is not None],
        reward=item["reward"],
        status=Sample.Status(item.get("status", "completed")),
        metadata={"instance_id": item["instance_id"], **item["extra_info"]},
    )


def item_of(sample: Sample, uid: str, instance_id: str) -> Item:
    """What a program writes to the service that has a sample, as of an adapter's session.

    Raises:
        ValueError: its reward is no number.
    """
    if not isinstance(sample.reward, int | float):
        raise ValueError(f"reward of sample {uid}: {sample.reward!r} (wanted: a number)")
    messages = sample.prompt if isinstance(sample.prompt, list) else []
    known = {
        "loss_mask": sample.loss_mask,
        "rollout_log_probs": sample.rollout_log_probs,
        "version_spans": [list(span) for span in sample.version_spans] or None,
    }
    return {
        **dict(uid=uid, instance_id=instance_id, messages=messages, reward=float(sample.reward)),
        **dict(extra_info=sample.metadata, tokens=sample.tokens, response_length=sample.response_length),
        **{name: value for name, value in known.items() if value is not None},
        "status": "truncated" if sample.status is Sample.Status.TRUNCATED else "completed",
    }


def _tokenized(
    messages: list[dict[str, Any]], tokenizer: Any, mask_type: str
) -> tuple[list[int], int, list[int]]:
    """The response begins at the first token of the assistant; where there is none, it is the last token."""
    tokens, mask = _mask_generator(tokenizer, mask_type).get_loss_mask(messages)
    length = max(1, *get_response_lengths([mask]))
    return tokens, length, mask[len(mask) - length :]


@cache
def _mask_generator(tokenizer: Any, mask_type: str) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(tokenizer, mask_type)
