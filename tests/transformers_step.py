"""One optimizer step of a ``transformers`` model, sample by sample: what trainers are held against.

batch = noisy_rollout(checkpoint)                       # its old log-probs lie around those of the model
step = transformers_step(model, batch)
step["loss"], step["grad_norm"]                         # the model has the new weights
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import transformers

from tests.trainer_batches import random_rollout


def noisy_rollout(checkpoint) -> dict:
    """A random rollout whose ratios and clipping matter."""
    batch = random_rollout(vocab_size=256)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    for i, tokens in enumerate(batch["tokens"]):
        with torch.no_grad():
            chosen = _chosen(_log_softmax(model, tokens, batch["response_lengths"][i]), tokens)
        noise = 0.3 * torch.randn(chosen.shape, generator=generator)
        batch["rollout_log_probs"][i] = (chosen + noise).tolist()
    return batch


def _log_softmax(model, tokens, response_length):
    return model(input_ids=torch.tensor([tokens])).logits[0, -response_length - 1 : -1].log_softmax(-1)


def _chosen(log_softmax, tokens):
    return log_softmax.gather(-1, torch.tensor(tokens[-len(log_softmax) :])[:, None])[:, 0]


def transformers_step(
    model,
    rollout,
    eps: float = 1e-8,
    kl_coef: float = 0.0,
    reference: Callable[[], AbstractContextManager] | None = None,
) -> dict[str, float]:
    """PPO's clipped loss, entropy bonus, gradient clipping and AdamW on what of the model trains.

    Args:
        kl_coef: of the k3 estimator of the KL to the model as it is within ``reference()``.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=eps)
    total = 0.0
    for i, tokens in enumerate(rollout["tokens"]):
        log_softmax = _log_softmax(model, tokens, rollout["response_lengths"][i])
        new = _chosen(log_softmax, tokens)
        ratio = (new - torch.tensor(rollout["rollout_log_probs"][i])).exp()
        advantage = rollout["rewards"][i]
        token_loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
        token_loss = token_loss + 0.01 * (log_softmax.exp() * log_softmax).sum(-1)
        if reference is not None:
            with reference(), torch.no_grad():
                base = _chosen(_log_softmax(model, tokens, rollout["response_lengths"][i]), tokens)
            token_loss = token_loss + kl_coef * ((base - new).exp() - (base - new) - 1)
        mask = torch.tensor(rollout["loss_masks"][i])
        loss = (token_loss * mask).sum() / mask.sum() / len(rollout["tokens"])
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
    optimizer.step()
    return {"loss": total, "grad_norm": float(norm)}
