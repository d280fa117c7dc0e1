"""How old the weights are that made the tokens of a rollout."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def staleness_metrics(
    batch: Mapping[str, Any], version: int, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """``rollout/staleness/mean`` and ``max`` over the trained tokens of all ranks.

    The age of a token is ``version`` less that of the weights that made it. Tokens of unknown version are
    left out; without any other there is no metric.

    Args:
        batch: this rank's shard; ``token_versions`` are [R] int64 per sample, -1 where not known.
        version: of the weights that the rollout is trained on, as engines would count them.
    """
    if "token_versions" not in batch:
        return {}
    made, mask = torch.cat(batch["token_versions"]), torch.cat(batch["loss_masks"])
    ages = version - made[(mask != 0) & (made >= 0)]
    total = torch.stack([ages.sum(), torch.tensor(len(ages), device=ages.device)])
    # Another engine's versions may lie above ours.
    oldest = ages.max() if len(ages) else torch.full_like(total[0], torch.iinfo(torch.long).min)
    if group is not None:
        dist.all_reduce(total, group=group)
        dist.all_reduce(oldest, op=dist.ReduceOp.MAX, group=group)
    age, count = total.tolist()
    if not count:
        return {}
    return {"rollout/staleness/mean": age / count, "rollout/staleness/max": float(oldest)}
