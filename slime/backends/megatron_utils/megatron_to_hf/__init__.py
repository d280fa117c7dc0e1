"""Full megatron-core parameters -> Hugging Face tensors."""

from argparse import Namespace

import torch

from slime.backends.megatron_utils.named_params import strip_param_name_prefix
from slime.backends.megatron_utils.weight_rules import rule_for


def convert_to_hf(args: Namespace, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(HF name, tensor) pairs that the full parameter ``name`` holds; views of it where possible.

    ``name`` is global: its layer number counts over the whole model. Vocabulary padding is cut off. The copy
    of a tied embedding on the last pipeline stage has no HF tensor of its own: it gives none.

    Raises:
        ValueError: the parameter has no Hugging Face counterpart.
    """
    name = strip_param_name_prefix(name)
    if name == "output_layer.weight" and not args.untie_embeddings_and_output_weights:
        return []
    rule = rule_for(name)
    return list(zip(rule.hf_names, rule.split(param, args), strict=True))
