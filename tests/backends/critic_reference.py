"""Optimizer steps of a critic in plain transformers, sample by sample."""

import torch
import torch.nn.functional as F
import transformers

CLIP, GAMMA, LAMBDA = 0.02, 0.98, 0.9
# Two steps of 4 samples: in the second one values have moved, so clipping matters.
PPO = dict(value_clip=CLIP, gamma=GAMMA, lambd=LAMBDA, clip_grad=1.0)


def _gae(rewards, values):
    """Advantages by the sum they are defined as (arXiv 1506.02438, eq. 16)."""
    deltas = [
        r + GAMMA * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, r in enumerate(rewards)
    ]
    return [
        sum((GAMMA * LAMBDA) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]


def transformers_steps(checkpoint, rollout):
    """Two optimizer steps, sample by sample; the head starts as the critic's does."""
    trunk = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    weight = torch.empty(1, 64).normal_(0, 0.02, generator=torch.Generator().manual_seed(1234))
    head = {"weight": torch.nn.Parameter(weight), "bias": torch.nn.Parameter(torch.zeros(1))}

    def values_of(i):
        tokens, response = rollout["tokens"][i], rollout["response_lengths"][i]
        hidden = trunk(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        return F.linear(hidden, head["weight"], head["bias"])[-response - 1 : -1, 0]

    with torch.no_grad():
        old = [values_of(i) for i in range(8)]
    masks = [torch.tensor(mask, dtype=torch.bool) for mask in rollout["loss_masks"]]
    targets = []
    for values, mask, reward in zip(old, masks, rollout["rewards"], strict=True):
        trained = values[mask].double().tolist()
        advantages = _gae([0.0] * (len(trained) - 1) + [reward], trained)
        targets.append(torch.tensor(advantages) + values[mask])
    params = [*trunk.parameters(), *head.values()]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), eps=1e-8)
    steps = []
    for members in (range(4), range(4, 8)):
        optimizer.zero_grad()
        total = clipped = 0.0
        for i in members:
            new, before = values_of(i)[masks[i]], old[i][masks[i]]
            near = before + (new - before).clamp(-CLIP, CLIP)
            loss = torch.maximum((new - targets[i]) ** 2, (near - targets[i]) ** 2).mean() / 4
            loss.backward()
            total += loss.item()
            clipped += ((new - before).abs() > CLIP).float().mean().item() / 4
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        steps.append({"value_loss": total, "value_clipfrac": clipped, "grad_norm": float(norm)})
    head = {f"output_layer.{name}": p.detach() for name, p in head.items()}
    norm = {"decoder.final_layernorm.weight": trunk.norm.weight.detach()}
    whole = {name: p.detach() for name, p in trunk.state_dict().items()}
    return {"steps": steps, "weights": {**head, **norm}, "values": old, "trunk": whole}
