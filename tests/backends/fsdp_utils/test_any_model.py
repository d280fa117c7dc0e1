"""Architectures that no part of slime knows train: one step of SFT is that of plain ``transformers``."""

import pytest
import torch
import transformers

from slime.backends.fsdp_utils.model import empty_model, require_fixed_biases
from slime.config.run import run_config
from slime.models import shape_of_any
from tests.backends.fsdp_harness import fsdp_args, train
from tests.backends.fsdp_utils.architectures import model_args, save
from tests.megatron_harness import run_ranks
from tests.trainer_batches import random_rollout

SFT = {"loss_type": "sft_loss", "compute_advantages_and_returns": False, "calculate_per_token_loss": True}


def plain_step(path, rollout):
    """Negative log-likelihood per token, clipped, AdamW without decay of vectors; sample by sample."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() != 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-8)
    total, count = 0.0, sum(sum(mask) for mask in rollout["loss_masks"])
    for tokens, length, mask in zip(
        rollout["tokens"], rollout["response_lengths"], rollout["loss_masks"], strict=True
    ):
        row = torch.tensor(tokens)
        logits = model(input_ids=row[None]).logits[0, -length - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, row[-length:, None])[:, 0]
        loss = -(chosen * torch.tensor(mask)).sum() / count
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
    optimizer.step()
    return total, float(norm), dict(model.named_parameters())


@pytest.mark.parametrize("architecture", ["GPTNeoX", "Gemma", "Gemma2", "GPT2", "Bloom"])
def test_one_step_of_sft(architecture, tmp_path):
    path = save(tmp_path, architecture)
    rollout = random_rollout(96)
    loss, norm, weights = plain_step(path, rollout)
    shape = shape_of_any(path, False)
    args = fsdp_args(path, shape=shape, gradient_checkpointing=architecture == "Gemma", **SFT)
    result = run_ranks(train, 2, args, [rollout])[0]
    ((step,), _) = result["reports"][0]
    assert step["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    # Some have a name in checkpoints that is not the module's.
    assert len(result["weights"]) == len(weights)
    same = [name for name in weights if name in result["weights"]]
    assert len(same) >= len(weights) - 1
    for name in same:
        torch.testing.assert_close(result["weights"][name], weights[name].detach(), rtol=0, atol=1e-4)


def test_what_a_model_leaves_to_chance_in_training_is_not_computed(tmp_path):
    path, rollout = save(tmp_path, "Mixtral"), random_rollout(96)
    loss, norm, _ = plain_step(path, rollout)
    args = fsdp_args(path, shape=shape_of_any(path, False), gradient_checkpointing=True, **SFT)
    (result,) = run_ranks(train, 1, args, [rollout])
    ((step,), _) = result["reports"][0]
    assert step["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_biases_of_experts_that_should_move_are_refused_in_any_architecture(tmp_path):
    config = transformers.Lfm2MoeConfig(
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4},
        **{"num_experts_per_tok": 2, "num_dense_layers": 1, "use_expert_bias": True},
        layer_types=["full_attention", "full_attention"],
    )
    config.save_pretrained(tmp_path)
    args = model_args(str(tmp_path), moe_router_bias_update_rate=1e-3)
    model = empty_model(tmp_path, False)
    with pytest.raises(ValueError, match=r"^--moe-router-bias-update-rate 0\.001: .*expert_bias alone"):
        require_fixed_biases(run_config(args).experts, model)
    require_fixed_biases(
        run_config(model_args(str(tmp_path), moe_router_bias_update_rate=0.0)).experts, model
    )
    require_fixed_biases(run_config(args).experts, torch.nn.Linear(2, 2))


def test_the_shape_says_what_config_json_says(tmp_path):
    shape = shape_of_any(save(tmp_path, "GPT2"), False)
    wanted = {"model_type": "gpt2", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 128}
    assert wanted.items() <= shape.items()
    assert (shape["num_attention_heads"], shape["num_query_groups"], shape["kv_channels"]) == (4, 4, 8)
