"""Adapters of PEFT's own that change a model, and what an engine is to say with them."""

from copy import deepcopy
from typing import Any

import peft
import torch

from slime.adapters.peft_config import served_config
from slime.adapters.peft_format import module_of
from slime.config.lora import LoraConfig
from slime.utils.tensor_bucket import serialize_tensors, tensor_sha256

RANK, ALPHA = 4, 6.0


class PeftAdapter:
    """An adapter of all linear layers of a model, which stays as it is.

    Attributes:
        model: PEFT's, with the adapter.
    """

    def __init__(self, base: torch.nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(deepcopy(base), lora).eval()
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                if "lora_B" in name:
                    param.normal_(0, 0.3)
        self.tensors = {
            name: tensor.detach().clone().contiguous()
            for name, tensor in peft.get_peft_model_state_dict(self.model).items()
        }

    def body(self, name: str) -> dict[str, Any]:
        """The body of a request to load it."""
        return {
            "lora_name": name,
            "config_dict": served_config(
                LoraConfig(lora_rank=RANK, lora_alpha=ALPHA), map(module_of, self.tensors)
            ),
            "expected_checksums": {key: tensor_sha256(tensor) for key, tensor in self.tensors.items()},
            "serialized_named_tensors": [serialize_tensors(self.tensors, share=False)],
        }
