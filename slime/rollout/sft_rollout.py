"""Supervised fine-tuning: "rollouts" that come from the data, with loss masks, and need no engine."""

from functools import cache
from typing import Any

from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout.base_types import RolloutError, blame, name_samples
from slime.rollout.ledger import RolloutAccount
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


def generate_rollout(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> list[list[Sample]]:
    """``--rollout-batch-size`` groups of one sample, its prompt being a list of chat messages.

    The response of a sample begins at the first token that is trained on. Where there is none, it is the last
    token, with a mask of 0.
    """
    if evaluation:
        raise RolloutError(
            "--rollout-function-path slime.rollout.sft_rollout.generate_rollout cannot evaluate: "
            "pass --eval-function-path slime.rollout.sglang_rollout.generate_rollout"
        )
    config = filled(GenerationConfig, args)
    size = config.batches.n_samples_per_prompt
    if size != 1:
        raise RolloutError(f"--n-samples-per-prompt {size}: expected 1 for SFT")
    source = config.hf_checkpoint
    masks = _mask_generator(source.hf_checkpoint, config.data.loss_mask_type, source.trust_remote_code)
    account = RolloutAccount(data_buffer)
    groups = account.take(config.batches.rollout_batch_size)
    for group in groups:
        _fill(group[0], masks)
        account.train(group)
    account.close()
    return groups


@cache
def _mask_generator(path: str, mask_type: str, trust_remote_code: bool) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(load_tokenizer(path, trust_remote_code), mask_type)


def _fill(sample: Sample, masks: MultiTurnLossMaskGenerator) -> None:
    if not isinstance(sample.prompt, list):
        raise RolloutError(
            f"{name_samples(sample)}: the prompt is {type(sample.prompt).__name__}, expected a message list "
            "(--input-key names the field; SFT goes without --apply-chat-template)"
        )
    with blame(masks.get_loss_mask, sample):  # which renders a template of the user
        sample.tokens, mask = masks.get_loss_mask(sample.prompt, sample.metadata.get("tools"))
    (length,) = masks.get_response_lengths([mask])
    sample.response_length = max(length, 1)
    sample.loss_mask = mask[-sample.response_length :]
    sample.status = Sample.Status.COMPLETED
    sample.reward = 0
