"""The warnings that a rollout cannot teach what it should, though nothing has failed."""

from collections.abc import Callable, Sequence

from slime.config.training import TrainingConfig
from slime.observability.flat_rewards import flat_rewards
from slime.utils.types import Sample

_MOST = 0.9  # the part of the samples from which on a fault is one of the run
Look = Callable[[TrainingConfig, Sequence[Sample]], str | None]


class SilentRollouts:
    """Tells of each fault once for a row of rollouts that have it."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._told: set[Look] = set()

    def warnings(self, samples: Sequence[Sample]) -> list[str]:
        """What a user should be told of a rollout."""
        found = {look: text for look in LOOKS if (text := look(self._config, samples))}
        new = [text for look, text in found.items() if look not in self._told]
        self._told = set(found)
        return new


def cut_off(config: TrainingConfig, samples: Sequence[Sample]) -> str | None:
    """Responses that reached their longest length, before what a reward looks for at their end."""
    cut = sum(sample.status == Sample.Status.TRUNCATED for sample in samples)
    if config.loss.loss_type != "policy_loss" or cut < max(1, _MOST * len(samples)):
        return None
    return (
        f"{cut} of {len(samples)} responses were cut off before the model ended them, so a reward that reads "
        "their end finds nothing (wanted: a larger --rollout-max-response-len, or turns that end)"
    )


def untrained(config: TrainingConfig, samples: Sequence[Sample]) -> str | None:
    """Responses without a token that is trained on."""
    empty = sum(sample.effective_response_length == 0 for sample in samples)
    if empty < max(1, _MOST * len(samples)):
        return None
    of_chats = " (--loss-mask-type names the family of the chat template)"
    return (
        f"{empty} of {len(samples)} responses have an empty loss mask, so nothing is learned from them"
        f"{of_chats if config.loss.loss_type == 'sft_loss' else ''}"
    )


LOOKS: tuple[Look, ...] = (flat_rewards, cut_off, untrained)
