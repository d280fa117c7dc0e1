"""The parameters of each pipeline stage: their names, and how many elements a rank has of them.

They are those of the model itself, which the trainer makes without the memory for it (`Trainer.parameters`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from slime.adapters.targets import is_of_adapter, is_target
from slime.check.layout import Layout
from slime.config.memory import MemoryConfig
from slime.config.trainers import MEGATRON
from slime.models import FAMILIES
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["embedding", "dense", "experts"]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_OF_EXPERT = ".experts.local_experts.0."
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class WholeParameter(NamedTuple):
    """A parameter as a rank that shares it with nobody has it; of the experts of a layer the first one's.

    Attributes:
        split: whether tensor-parallel ranks, of experts expert-tensor-parallel ones, share it.
    """

    name: str
    elements: int
    split: bool


@dataclass(frozen=True)
class Parameter:
    """``count`` parameters of one size, the first one being ``name``; a rank has ``elements`` of each."""

    name: str
    kind: Kind
    elements: int
    count: int = 1


def whole_parameters(config: MemoryConfig, role: str = "actor") -> list[WholeParameter]:
    """The parameters of a model of a family, whichever trainer it has. Takes up to a second."""
    made: list[WholeParameter] = load_function(MEGATRON.parameters)(config.flat, role)
    return made


def stage_parameters(
    config: MemoryConfig, layout: Layout, stage: int, whole: Sequence[WholeParameter], role: str = "actor"
) -> list[list[Parameter]]:
    """Counts the parameters of each model chunk of a rank of this stage, of a model that has ``whole``."""
    chunks = layout.stages[stage]
    return [
        list(
            _chunk(
                config,
                layout,
                whole,
                layers,
                first=stage == 0 and number == 0,
                last=stage == layout.pp - 1 and number == len(chunks) - 1,
                critic=role == "critic",
            )
        )
        for number, layers in enumerate(chunks)
    ]


def _chunk(
    config: MemoryConfig,
    layout: Layout,
    whole: Iterable[WholeParameter],
    layers: range,
    *,
    first: bool,
    last: bool,
    critic: bool,
) -> Iterator[Parameter]:
    for parameter in whole:
        of_layer = _LAYER.match(parameter.name)
        at_end = first if parameter.name == _EMBEDDING else last
        if int(of_layer[1]) in layers if of_layer else at_end:
            yield _of_rank(config, layout, parameter, critic)
        shares = not (critic or config.model.untie_embeddings_and_output_weights)
        if parameter.name == _EMBEDDING and last and not first and shares:
            # On another stage than the embedding a tied head is a copy of it.
            yield _of_rank(config, layout, parameter._replace(name=_HEAD), critic)


def _of_rank(config: MemoryConfig, layout: Layout, parameter: WholeParameter, critic: bool) -> Parameter:
    if _OF_EXPERT in parameter.name:
        shares = layout.etp if parameter.split else 1
        experts = config.model.num_experts // layout.ep
        return Parameter(parameter.name, "experts", parameter.elements // shares, experts)
    kind = _kind(parameter.name, critic)
    return Parameter(parameter.name, kind, parameter.elements // (layout.tp if parameter.split else 1))


def _kind(name: str, critic: bool) -> Kind:
    if _OF_EXPERT in name:
        return "experts"
    return "embedding" if name == _EMBEDDING or (name == _HEAD and not critic) else "dense"


def counted(parameters: Iterable[Parameter]) -> dict[Kind, int]:
    """Elements of each kind."""
    kinds: tuple[Kind, ...] = ("embedding", "dense", "experts")
    every = list(parameters)
    return {kind: sum(p.elements * p.count for p in every if p.kind == kind) for kind in kinds}


def whole_model(
    config: MemoryConfig, role: str = "actor", whole: Iterable[WholeParameter] | None = None
) -> dict[Kind, int]:
    """Elements of the model as published: on one rank, its vocabulary not padded.

    Args:
        whole: its parameters, where they have been made already.
    """
    total: dict[Kind, int] = {"embedding": 0, "dense": 0, "experts": 0}
    for parameter in whole_parameters(config, role) if whole is None else whole:
        if is_of_adapter(parameter.name):
            continue
        kind = _kind(parameter.name, critic=role == "critic")
        elements = parameter.elements
        if kind == "embedding":
            elements = elements // config.model.padded_vocab_size * config.model.vocab_size
        total[kind] += elements * (config.model.num_experts if kind == "experts" else 1)
    return total


def total_of_any(config: MemoryConfig, role: str = "actor") -> dict[Kind, int]:
    """Parameters of a family, else those that ``transformers`` makes of config.json, without their values.

    A critic has a value head in the place of the output layer.
    """
    if config.model.model_type in FAMILIES:
        return whole_model(config, role)
    model = _transformers_model(config)
    embeddings = sum(p.numel() for p in model.get_input_embeddings().parameters())
    every = sum(p.numel() for p in model.parameters())
    if role == "critic" and (head := model.get_output_embeddings()) is not None:
        tied = head.weight is model.get_input_embeddings().weight
        every += head.weight.shape[-1] + 1 - (0 if tied else head.weight.numel())
    return {"embedding": embeddings, "dense": every - embeddings, "experts": 0}


def adapter_elements(config: MemoryConfig, role: str) -> int:
    """Parameters of the adapters of a model of any architecture; a critic has none."""
    if role != "actor" or not config.lora.adapts:
        return 0
    if config.model.model_type in FAMILIES:
        every = whole_parameters(config, role)
        return sum(parameter.elements for parameter in every if is_of_adapter(parameter.name))
    from slime.adapters.linears import linears

    layers = linears(_transformers_model(config)).items()
    sizes = [each.in_features + each.out_features for name, each in layers if is_target(config.lora, name)]
    return config.lora.lora_rank * sum(sizes)


def _transformers_model(config: MemoryConfig) -> "PreTrainedModel":
    import torch  # these two take seconds, which the families do not need
    from transformers import AutoConfig, AutoModelForCausalLM

    path, trusted = config.hf_checkpoint.hf_checkpoint, config.hf_checkpoint.trust_remote_code
    described = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(described, trust_remote_code=trusted)
    return model
