"""Nuclei of rows of logits, and log-probs within them.

`slime.training.nuclei` says what a nucleus is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime.training.context_parallel import ResponseRows

FLAGS = "--rollout-top-p, --rollout-top-k"
IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"


@dataclass(frozen=True)
class Nuclei:
    """The nuclei of N rows of logits.

    Attributes:
        rows: [M] int64 in ascending order: to which of the rows each id belongs.
        ids: [M] int64, without a repetition within a row.
        recorded: [N] bool: whether a row has a nucleus.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    recorded: torch.Tensor

    def of_slice(self, start: int, width: int) -> "Nuclei":
        """The part in a slice of the vocabulary, with columns of the slice for ids."""
        columns = self.ids - start
        here = (columns >= 0) & (columns < width)
        return Nuclei(self.rows[here], columns[here], self.recorded)

    def of_rows(self, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows, counted from the first one, and ids of some successive rows."""
        ends = torch.tensor([here.start, here.stop], device=self.rows.device)
        begin, end = torch.searchsorted(self.rows, ends).tolist()
        return self.rows[begin:end] - here.start, self.ids[begin:end]


def nuclei_of_rows(batch: Mapping[str, Any], responses: ResponseRows, vocab_size: int) -> Nuclei:
    """Collects the nuclei of this rank's rows of a micro-batch; a row's own target is always in its nucleus.

    Raises:
        ValueError: the micro-batch has none.
    """
    if batch.get(IDS) is None or batch.get(OFFSETS) is None:
        raise ValueError(f"{FLAGS}: the micro-batch lacks {IDS} or {OFFSETS}")
    device = responses.targets.device
    sizes = torch.cat([_tensor(offsets).diff() for offsets in batch[OFFSETS]])
    ids = torch.cat([_tensor(of_sample) for of_sample in batch[IDS]])
    rows = torch.arange(len(sizes)).repeat_interleave(sizes)
    if responses.mine is not None:
        place = torch.full((len(sizes),), -1)
        place[responses.mine] = torch.arange(len(responses.mine))
        sizes, rows = sizes[responses.mine], place[rows]
        rows, ids = rows[rows >= 0], ids[rows >= 0]
    recorded = (sizes > 0).to(device)
    own = recorded.nonzero()[:, 0]
    pairs = torch.cat([rows.to(device), own]), torch.cat([ids.to(device), responses.targets[own]])
    keys = torch.unique(pairs[0] * vocab_size + pairs[1])
    return Nuclei(keys // vocab_size, keys % vocab_size, recorded)


def _tensor(values: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device="cpu").reshape(-1)


class NucleusLogProbs:
    """log p of targets within their nuclei, z_target - log sum e^z, of rows seen a few at a time.

    All is relative to the largest logit of the nucleus, which may be far below the row's.
    """

    def __init__(self, nuclei: Nuclei, local: torch.Tensor, mine: torch.Tensor, dtype: torch.dtype) -> None:
        """``local``, ``mine``: [N], each target's column in this slice, and whether it is in it."""
        self._nuclei, self._local, self._mine = nuclei, local, mine
        count, device = len(local), local.device
        self._peaks = torch.full((count,), -torch.inf, dtype=dtype, device=device)
        # In float64, so that what a sum comes to does not depend on its order.
        self._sums = torch.zeros(2, count, dtype=torch.float64, device=device)

    def add(self, here: slice, z: torch.Tensor) -> None:
        """``z``: [n, V / tp], scaled logits of the rows ``here``."""
        rows, columns = self._nuclei.of_rows(here)
        values = z[rows, columns]
        peaks = self._peaks[here].scatter_reduce_(0, rows, values, "amax")
        self._sums[0, here].index_add_(0, rows, (values - peaks[rows]).exp().double())
        self._sums[1, here] = z.gather(-1, self._local[here, None])[:, 0].double()

    def finish(self, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
        """[N]; not a number where there is no nucleus. Over all slices of the vocabulary."""
        total, target = self._sums
        if group is not None:
            own = self._peaks.clone()
            torch.distributed.all_reduce(self._peaks, torch.distributed.ReduceOp.MAX, group)
            total *= (own - self._peaks).exp().nan_to_num(0.0)
            target *= self._mine
            torch.distributed.all_reduce(self._sums, group=group)
        return (target - self._peaks - total.log()).to(self._peaks.dtype)

    def gradient(self, here: slice, z: torch.Tensor, outer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``outer`` [n] times (1_target - p), after ``finish``: rows, from the first one, columns, values."""
        rows, columns = self._nuclei.of_rows(here)
        p = (z[rows, columns] - self._peaks[here][rows]).exp() / self._sums[0, here].to(z.dtype)[rows]
        of_target = (columns == self._local[here][rows]) & self._mine[here][rows]
        return rows, columns, outer[rows] * (of_target.to(z.dtype) - p)
