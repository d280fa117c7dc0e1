"""What ``/weights_checker`` and ``/get_weights_by_name`` tell about the weights."""

import hashlib
from typing import Any

import torch

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.backends.embedded_engine.served_shards import ServedShards
from slime.utils.tensor_bucket import tensor_digest

ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors")


class WeightChecker:
    def __init__(self, parameters: NamedWeights, tp_size: int = 1) -> None:
        self._parameters, self._tp_size = parameters, tp_size
        self._shards = ServedShards(parameters, tp_size)
        self._snapshot: dict[str, torch.Tensor] | None = None

    def run(self, action: str, skip: list[str], per_rank: bool = False) -> dict[str, Any]:
        """Performs an action; the result joins the response.

        Args:
            per_rank: tells checksums of the tensors that SGLang's ranks would have.

        Raises:
            BadRequest: unknown action, released weights, or a comparison that fails or has nothing to
                compare with.
        """
        if action not in ACTIONS:
            raise BadRequest(f"action {action!r}: wanted one of {', '.join(ACTIONS)}")
        self._parameters.require_memory()
        if action == "checksum":
            return self._of_each_rank() if per_rank else self._checksums()
        if action == "snapshot":
            self._snapshot = self._parameters.copy()
        elif action == "compare":
            self._compare(set(skip))
        else:
            for name, tensor in self._parameters.named.items():
                if name not in skip:
                    tensor.normal_()
        return {}

    def values(self, name: str, truncate_size: int) -> list[Any]:
        """The first rows of a weight as nested lists."""
        if name not in self._parameters.named:
            raise BadRequest(f"name {name!r}: no such weight")
        self._parameters.require_memory()
        return self._parameters.named[name][: max(truncate_size, 0)].float().tolist()

    def _checksums(self) -> dict[str, Any]:
        named = dict(sorted(self._parameters.named.items()))
        checksums = {name: tensor_digest(tensor) for name, tensor in named.items()}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in named.items()}
        whole = hashlib.blake2b("".join(checksums.values()).encode(), digest_size=8).hexdigest()
        ranks, stage = range(self._tp_size), {"pp_rank": 0, "pp_size": 1}
        parallelism = [{"tp_rank": rank, "tp_size": len(ranks), **stage} for rank in ranks]
        # SGLang has no dtypes; its names are those of joined tensors.
        rank: dict[str, Any] = {"checksums": checksums, "dtypes": dtypes}
        rank |= {"per_gpu_checksum": whole, "parallelism_info": parallelism}
        return {"ranks": [rank], "per_engine_checksum": whole}

    def _of_each_rank(self) -> dict[str, Any]:
        ranks = []
        for number, (checksums, dtypes) in enumerate(self._shards.checksums()):
            place = {"tp_rank": number, "tp_size": self._tp_size, "pp_rank": 0, "pp_size": 1}
            ranks.append({"checksums": checksums, "dtypes": dtypes, "parallelism_info": [place]})
        return {"ranks": ranks}

    def _compare(self, skip: set[str]) -> None:
        if self._snapshot is None:
            raise BadRequest("compare: there is no snapshot to compare with")
        current = self._parameters.named
        different = [
            name
            for name, tensor in self._snapshot.items()
            if name not in skip and not torch.equal(tensor, current[name].cpu())
        ]
        if different:
            raise BadRequest(f"compare: {len(different)} weights differ from the snapshot: {different[:5]}")
