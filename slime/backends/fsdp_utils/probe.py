"""Which ways to compute a batch give what ``transformers`` computes of each sequence alone.

Measured with a small model of the same architecture and random weights, in float32, with sequences beyond
every window, chunk and context of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.small_config import VARIANTS, Small, small_config

Rows = Sequence[torch.Tensor]
"""Token ids of sequences, each [length]."""
REFERENCE = "eager"
"""The implementation of attention that knows all that an architecture asks of it."""

_TOLERANCE, _WORDS = 1e-4, 9
_MAX_PARAMETERS = 100_000_000
# Whatever the code of an architecture raises for a config that was made for nobody, or for packed rows.
_UNBUILT = (Exception,)


class NotReproducible(ValueError):
    """Sequences cannot be trained on with this architecture."""


@dataclass(frozen=True)
class Probe:
    """A small model, sequences for it, and its logits of each of them alone.

    Attributes:
        wanted: [T, V], of ``rows`` one after the other.
    """

    model: PreTrainedModel
    rows: Rows
    wanted: torch.Tensor

    @torch.no_grad()
    def why_not(self, compute: Callable[[], torch.Tensor], wanted: torch.Tensor) -> str:
        """Empty if ``compute`` gives the logits that are ``wanted``."""
        try:
            gap = distance(compute(), wanted)
        except _UNBUILT as error:
            return first_line(error)
        return "" if gap < _TOLERANCE else f"logits differ by {gap:.2g} of their spread"


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in standard deviations of what is wanted."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().std())


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@torch.no_grad()
def small_probe(model: PreTrainedModel, device: torch.device, multiple: int = 1) -> Probe | str:
    """Makes a small model of ``model``'s architecture, or says why there is none. Lengths of rows are
    multiples of a number.

    Raises:
        NotReproducible: it is not causal, or computes a sequence otherwise after another one.
    """
    reasons = []
    for variant in range(VARIANTS):
        try:
            small = small_config(model.config, variant)
            return _probe(_architecture(model), small, device, multiple)
        except NotReproducible:
            raise
        except _UNBUILT as error:
            reasons.append(first_line(error))
    return reasons[0]


def _architecture(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Returns the class of a model without what FSDP makes of it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _probe(kind: type[PreTrainedModel], small: Small, device: torch.device, multiple: int) -> Probe:
    with torch.device("meta"):
        count = sum(param.numel() for param in kind._from_config(small.config).parameters())
    if count > _MAX_PARAMETERS:
        raise ValueError(f"a small model of it has {count} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = kind._from_config(small.config, attn_implementation=REFERENCE, dtype=torch.float32)
        _stir(model)
    model.to(device).eval()
    try:
        return _of_rows(model, [-(-length // multiple) * multiple for length in small.lengths])
    except NotReproducible:
        raise
    except _UNBUILT:  # positions beyond a table of them
        return _of_rows(model, [max(length // multiple, 1) * multiple for length in small.within])


def _stir(model: PreTrainedModel) -> None:
    """Makes every tensor matter: first weights of models hardly attend to anything."""
    for param in model.parameters():
        if param.dim() > 1:
            param.mul_(4)
        param.add_(torch.randn_like(param) * 0.05)


def _of_rows(model: PreTrainedModel, lengths: Sequence[int]) -> Probe:
    device, size = next(model.parameters()).device, model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(2)
    # Few different tokens, as in text: what chooses between keys meets equal ones.
    words = torch.randint(size, (_WORDS,), generator=generator).to(device)
    rows = [words[torch.randint(_WORDS, (length,), generator=generator)] for length in lengths]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    # From the shortest on: what adapts to the longest sequence so far then has no longer one behind it.
    rising = {i: alone(model, rows[i]) for i in order}
    wanted = torch.cat([rising[i] for i in range(len(rows))])
    if not bool(wanted.isfinite().all()) or not float(wanted.std()) > 0:
        raise ValueError("a small model of it gives no finite logits")
    if distance(torch.cat([alone(model, row) for row in rows]), wanted) > _TOLERANCE:
        raise NotReproducible("its logits depend on the sequences before")
    changed = rows[0].clone()
    changed[-1] = (changed[-1] + 1) % size
    if distance(alone(model, changed)[:-1], alone(model, rows[0])[:-1]) > _TOLERANCE:
        raise NotReproducible("it is not causal: its logits depend on tokens that come later")
    return Probe(model, rows, wanted)


def alone(model: PreTrainedModel, row: torch.Tensor) -> torch.Tensor:
    """[T, V] of one sequence [T], with nothing beside it."""
    logits: torch.Tensor = model(input_ids=row[None], use_cache=False).logits[0]
    return logits
