"""What a rank of the FSDP trainer keeps: its part of every weight, gradient and moment, in float32."""

from argparse import Namespace

from slime.check.parameters import Kind, whole_model
from slime.check.states import States, moments
from slime.models import FAMILIES

_FLOAT32 = 4


def sharded_states(args: Namespace, parameters: int, ranks: int) -> States:
    """Counts the sharded states of a model with so many parameters."""
    mine = -(-parameters // ranks)
    part, kept = mine * _FLOAT32, mine * moments(args)
    if args.fsdp_cpu_offload:
        return States(0, 0, 0, host=2 * part + kept)
    return States(weights=part, gradients=part, optimizer=kept)


def total_of_any(args: Namespace, role: str = "actor") -> dict[Kind, int]:
    """Parameters of a family, else those that ``transformers`` makes of config.json, without their values.

    A critic has a value head in the place of the output layer.
    """
    if args.model_type in FAMILIES:
        return whole_model(args, role)
    import torch  # these two take seconds, which the families do not need
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    embeddings = sum(p.numel() for p in model.get_input_embeddings().parameters())
    every = sum(p.numel() for p in model.parameters())
    if role == "critic" and (head := model.get_output_embeddings()) is not None:
        tied = head.weight is model.get_input_embeddings().weight
        every += head.weight.shape[-1] + 1 - (0 if tied else head.weight.numel())
    return {"embedding": embeddings, "dense": every - embeddings, "experts": 0}
