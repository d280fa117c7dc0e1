"""Which keys an indexer chooses where scores are equal: those of the tokens that come first.

An indexer adds up what its heads leave of products above 0, so that with few heads many keys have the score
0. ``topk`` takes any of them, others for rows of other lengths: a token would read other keys when it is
generated than in training.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def chosen_keys(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places [..., count] of the highest scores [..., keys], of equal ones the first; int64, in any order."""
    values, places = scores.topk(count)
    lowest = values[..., -1:]
    # What is not seen has the score -inf; rows that see no more keys than they choose read them all.
    tied = ((scores >= lowest).sum(dim=-1) > count) & (lowest[..., 0] > -torch.inf)
    if bool(tied.any()):
        ordered = (scores[tied] + 0.0).sort(dim=-1, descending=True, stable=True)  # -0.0 is 0.0
        places[tied] = ordered.indices[..., :count]
    return places


def choose_first_of_equals(model: torch.nn.Module) -> None:
    """Has the indexers of a model of ``transformers``, if it has any, choose so."""
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.forward = _choosing(module.forward)


def _choosing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def choosing(*args: Any, **kwargs: Any) -> Any:
        with _FirstOfEquals():
            return forward(*args, **kwargs)

    return choosing


class _FirstOfEquals(TorchFunctionMode):
    """``scores.topk(count, dim=-1)`` by `chosen_keys`; any other call as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (torch.Tensor.topk, torch.topk):
            return function(*args, **(kwargs or {}))
        scores, count = args
        if kwargs not in ({"dim": -1}, {}, None):
            raise ValueError(f"an indexer calls topk with {kwargs} (wanted: dim=-1)")
        places = chosen_keys(scores, count)
        return torch.return_types.topk((scores.gather(-1, places), places))
