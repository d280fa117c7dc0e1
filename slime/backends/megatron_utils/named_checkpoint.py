"""Several adapters in a checkpoint: the first is the checkpoint's own, the others lie beneath it."""

from pathlib import Path

from megatron.core import dist_checkpointing

from slime.backends.megatron_utils.sharded_state import METADATA, read_state, sharded_state, take
from slime.backends.megatron_utils.step import TrainState
from slime.config.backend import BackendConfig
from slime.config.checkpoints import CheckpointConfig


def _place(name: str) -> str:
    return f"adapter_{name}"


def other_places(state: TrainState) -> list[str]:
    """The directories of adapters, beneath the checkpoint's."""
    return [_place(name) for name in state.named.names[1:]] if state.named else []


def save_others(config: CheckpointConfig, state: TrainState, directory: Path) -> None:
    """Collective. Writes all adapters but the first, which is in place then, as the checkpoint's own."""
    if state.named is None:
        return
    first, *others = state.named.names
    for name in others:
        state.named.put_in_place(name)
        content = sharded_state(config, state, with_rng=False)
        dist_checkpointing.save(content, str(directory / _place(name)), content_metadata=METADATA)
    state.named.put_in_place(first)


def load_others(config: BackendConfig, state: TrainState, directory: Path, with_optimizer: bool) -> None:
    """Collective. Fills all adapters but the first, into which the checkpoint's own was read."""
    if state.named is None:
        return
    for name in state.named.names[1:]:
        state.named.put_in_place(name)
        path = directory / _place(name)
        template = sharded_state(
            config.checkpoints, state, with_optimizer=with_optimizer, with_rng=False, loading=True
        )
        loaded = read_state(template, path)
        take(config, state, loaded, loaded["scheduler"] if with_optimizer else None, path)
