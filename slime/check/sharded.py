"""What a rank of the FSDP trainer keeps: its part of every weight, gradient and moment, in float32."""

from argparse import Namespace

from slime.check.parameters import Kind, whole_model
from slime.check.states import States
from slime.models import FAMILIES

_FLOAT32 = 4


def sharded_states(args: Namespace, parameters: int, ranks: int) -> States:
    """Of a model with so many parameters."""
    part = -(-parameters // ranks) * _FLOAT32
    if args.fsdp_cpu_offload:
        return States(0, 0, 0, host=4 * part)
    return States(weights=part, gradients=part, optimizer=2 * part)


def total_of_any(args: Namespace) -> dict[Kind, int]:
    """Parameters of a family, else those that ``transformers`` makes of config.json, without their values."""
    if args.model_type in FAMILIES:
        return whole_model(args)
    import torch  # these two take seconds, which the families do not need
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    embeddings = sum(p.numel() for p in model.get_input_embeddings().parameters())
    every = sum(p.numel() for p in model.parameters())
    return {"embedding": embeddings, "dense": every - embeddings, "experts": 0}
