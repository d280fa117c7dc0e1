"""PEFT's own adapters and its own step: what those of the trainers are held against."""

import peft
import torch
import transformers

from tests.transformers_step import transformers_step

RANK, ALPHA, KL, EPS = 4, 6.0, 0.1, 1e-3  # of Adam: so that gradients of almost 0 make no large steps
FLAGS = {
    **dict(lora_rank=RANK, lora_alpha=ALPHA, use_rollout_logprobs=True, entropy_coef=0.01, adam_eps=EPS),
    **dict(use_kl_loss=True, kl_loss_coef=KL, kl_loss_type="k3"),
}


def base_model(checkpoint):
    """Reads the model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def save_random(checkpoint, path, seed: int = 3, **config) -> str:
    """Writes an adapter of PEFT's own that changes the model; returns its path."""
    torch.manual_seed(seed)
    targets = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    model = peft.get_peft_model(base_model(checkpoint), peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **targets))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(0, 0.3)
    model.save_pretrained(str(path))
    return str(path)


def peft_step(checkpoint, adapter, rollout) -> dict:
    """Takes one step; its loss and gradient norm, and the adapter and the merged weights after it."""
    model = peft.PeftModel.from_pretrained(base_model(checkpoint), adapter, is_trainable=True)
    step = transformers_step(model, rollout, EPS, KL, model.disable_adapter)
    trained = peft.get_peft_model_state_dict(model)
    return step | {"adapter": trained, "merged": model.merge_and_unload().state_dict()}


def tensors_of(weights) -> dict[str, torch.Tensor]:
    """Copies all tensors. Collective."""
    return {name: tensor.clone() for bucket in weights.buckets(100_000) for name, tensor in bucket}


def expect_close(found, expected) -> None:
    """Expects the same tensors, but for a tied head, within 1e-5."""
    missing = expected.keys() - found.keys() - {"lm_head.weight"}
    assert not missing and found.keys() <= expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def merged_by_hand(base, adapter, scale, dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Merges in float32 and rounds once; the weights that change, and what the adapter adds to them."""
    merged, added = {}, {}
    for name, up in adapter.items():
        if "lora_B" in name:
            weight = name.removeprefix("base_model.model.").replace("lora_B.", "")
            added[weight] = scale * up.float() @ adapter[name.replace("lora_B", "lora_A")].float()
            merged[weight] = (base[weight].float() + added[weight]).to(dtype)
    return merged, added
