"""Tenants of a training service, each trained alone by PEFT with torch's AdamW."""

import peft
import torch

from slime.training.backend import Adam
from tests.backends.lora_reference import base_model

NAMES = ["alice", "bob"]
CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
# So that gradients of almost 0 make no large steps.
ADAMS = {
    "alice": Adam(2e-3, eps=1e-3),
    "bob": Adam(1e-3, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5),
}
ROUNDS = 3


def data_of(name, number):
    """What a tenant trains on: different numbers of data, of them one alone, which leaves ranks without."""
    generator = torch.Generator().manual_seed(10 * number + len(name))
    made = []
    for _ in range([5, 1, 3][number]):
        length = int(torch.randint(4, 16, (), generator=generator))
        advantages = torch.randn(length - 1, generator=generator)
        advantages[0] = 0.0
        log_probs = -5.5 - 0.3 * torch.rand(length - 1, generator=generator)
        tokens = torch.randint(256, (length,), generator=generator)
        row = {"tokens": tokens, "advantages": advantages, "log_probs": log_probs}
        made.append({key: value.tolist() for key, value in row.items()})
    return made


def loss_of(name, number):
    return "cross_entropy" if name == "alice" else ["ppo", "importance_sampling"][number % 2]


def _of_token(kind, new, old, advantages):
    """The losses, as their papers have them."""
    if kind == "cross_entropy":
        return -(advantages * new).sum()
    ratio = (new - old).exp()
    if kind == "importance_sampling":
        return -(ratio * advantages).sum()
    clipped = ratio.clamp(*CLIPS.values())
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def log_probs_of(model, tokens):
    """Log-probs of all tokens but the first."""
    ids = torch.tensor(tokens)
    return model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def trained_alone(checkpoint, adapter, name):
    """Trains PEFT's model: it, and the loss and log-probs of each datum, round after round."""
    model = peft.PeftModel.from_pretrained(base_model(checkpoint), adapter, is_trainable=True)
    params, adam, told = [p for p in model.parameters() if p.requires_grad], ADAMS[name], []
    optimizer = torch.optim.AdamW(
        params, adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay
    )
    for number in range(ROUNDS):
        for datum in data_of(name, number):
            new = log_probs_of(model, datum["tokens"])
            old, advantages = torch.tensor(datum["log_probs"]), torch.tensor(datum["advantages"])
            loss = _of_token(loss_of(name, number), new, old, advantages)
            loss.backward()
            told.append((float(loss.detach()), new.tolist()))
        if adam.grad_clip_norm:
            assert torch.nn.utils.clip_grad_norm_(params, adam.grad_clip_norm) > adam.grad_clip_norm
        optimizer.step()
        optimizer.zero_grad()
    return model, told
