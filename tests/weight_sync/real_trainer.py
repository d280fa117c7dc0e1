"""Updates by trainer ranks that hold a checkpoint's weights, for `run_ranks`."""

import gc
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from slime.config.run import run_config
from slime.utils.types import EngineEndpoint
from slime.weight_sync.update import WeightUpdate


def update_engines(
    rank: int,
    args: Namespace,
    endpoints: Sequence[EngineEndpoint],
    then: Callable[[WeightUpdate], Any] = lambda update: update.run(2).sent,
) -> Any:
    """Gives the engines the weights of ``args.hf_checkpoint`` twice, as versions 1 and 2.

    Args:
        then: in place of the second update; its result is returned.

    Raises:
        RuntimeError: the rank leaves shared memory or a process group behind.
    """
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    shared, mine = Path("/dev/shm"), f"torch_{os.getpid()}_*"
    others = set(shared.glob(mine))  # of an earlier process with this id
    config = run_config(args)
    init(config)
    model = get_model(config)
    load_hf_weights(args, model, args.hf_checkpoint)
    update = WeightUpdate(config, HfWeights(args, model))
    groups = len(distributed_c10d._world.pg_map)
    update.connect(endpoints)
    try:
        update.run(1)
        return then(update)
    finally:
        update.disconnect()
        gc.collect()  # a failure's traceback holds the bucket
        left = set(shared.glob(mine)) - others
        if left or len(distributed_c10d._world.pg_map) != groups:
            raise RuntimeError(f"left behind: {left or 'a process group'}")
