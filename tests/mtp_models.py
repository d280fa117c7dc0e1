"""Tiny checkpoints with MTP layers, and what these have to compute.

reference = MtpReference("mimo", path, depths=2)      # writes the checkpoint
means, gradients = reference.step(samples, factor)    # of the loss; gradients under the checkpoint's names
gradients = reference.balance(samples, 0.3, 0.02)     # the same of the losses of routers

Written from DeepSeek-V3's report (arXiv:2412.19437, section 2.2, eqs 21 to 25), sample by sample, with
decoder layers of ``transformers``, and norms and projections in plain torch.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families import tiny_family

FILE = "model.safetensors"


@dataclass(frozen=True)
class Names:
    """How a family calls its layers: what is before the names of a depth, and of the decoder layer in it.

    ``hidden_first``: whether columns of the projection are for the hidden state first, then the embedding.
    """

    prefix: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    hidden_first: bool = False
    counts_on: bool = False
    one_plus: bool = False


_DEEPSEEK = Names(
    *("model.layers.{}.", "model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"), counts_on=True
)
NAMES = {
    "mimo": Names(
        *("model.mtp_layers.{}.", "model.mtp_layers.{}.", "token_layernorm", "hidden_layernorm"),
        *("input_proj", "final_layernorm"),
        hidden_first=True,
    ),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "qwen3_next": Names(
        *("mtp.", "mtp.layers.{}.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        one_plus=True,
    ),
}


class MtpReference:
    """A checkpoint of ``name`` with layers of so many depths, written to ``path``, and its model."""

    def __init__(self, name: str, path: Path, depths: int = 1, **changes: Any) -> None:
        self._names, self._path = NAMES[name], path
        self.model = tiny_family(name, path, **changes)
        self._last = self.model.config.num_hidden_layers - 1
        generator = torch.Generator().manual_seed(17)
        hidden = self.model.config.hidden_size
        decoder = self._of_layer(self.model, path / "plain")
        self._own: list[dict[str, torch.Tensor]] = []
        self._inner: list[torch.nn.Module] = []
        self.tensors: dict[str, torch.Tensor] = {}
        for depth in range(depths):
            noise = lambda *size: torch.randn(*size, generator=generator)
            own = {part: 0.3 * noise(hidden) + (0.0 if self._names.one_plus else 1.0) for part in _NORMS}
            own["projection"] = 0.1 * noise(hidden, 2 * hidden)
            layer = {part: tensor + 0.03 * noise(*tensor.shape) for part, tensor in decoder.items()}
            self.tensors |= self._named(depth, own) | self._named_layer(depth, layer)
            self._own.append({part: tensor.clone().requires_grad_() for part, tensor in own.items()})
            self._inner.append(self._model_with(layer, path / f"depth-{depth}"))
        save_file(load_file(path / FILE) | self.tensors, path / FILE, {"format": "pt"})
        config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": depths}
        (path / "config.json").write_text(json.dumps(config))

    def _of_layer(self, model: Any, path: Path) -> dict[str, torch.Tensor]:
        """Tensors of the decoder's last layer, under a checkpoint's names within it."""
        model.save_pretrained(path)
        prefix = f"model.layers.{self._last}."
        stored = load_file(path / FILE)
        return {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}

    def _model_with(self, layer: dict[str, torch.Tensor], path: Path) -> Any:
        """A copy of the model whose last layer has these tensors."""
        self.model.save_pretrained(path)
        changed = {f"model.layers.{self._last}.{name}": tensor for name, tensor in layer.items()}
        save_file(load_file(path / FILE) | changed, path / FILE, {"format": "pt"})
        return type(self.model).from_pretrained(path, dtype=torch.float32).eval()

    def _number(self, depth: int) -> int:
        return depth + (self._last + 1 if self._names.counts_on else 0)

    def _named(self, depth: int, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        prefix = self._names.prefix.format(self._number(depth))
        return {f"{prefix}{getattr(self._names, part)}.weight": tensor for part, tensor in own.items()}

    def _named_layer(self, depth: int, layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        prefix = self._names.layer.format(self._number(depth))
        return {prefix + name: tensor for name, tensor in layer.items()}

    def step(
        self, samples: list[tuple[list[int], list[int]]], factor: float
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Mean loss of each depth, and the gradient of factor / D times their sum.

        Args:
            samples: (tokens, mask of the last tokens) each.
        """
        sums, counts = [0.0] * len(self._own), [0] * len(self._own)
        for tokens, mask in samples:
            for depth, losses in enumerate(self._sample(torch.tensor(tokens), torch.tensor(mask))):
                sums[depth] = sums[depth] + losses.sum()
                counts[depth] += len(losses)
        means = [total / count for total, count in zip(sums, counts, strict=True)]
        (factor / len(means) * sum(means)).backward()
        return [mean.item() for mean in means], self._gradients()

    def balance(
        self, samples: list[tuple[list[int], list[int]]], coefficient: float, z_coefficient: float
    ) -> dict[str, torch.Tensor]:
        """Gradients of what balances experts, over the rows of all samples together, summed over depths.

        Switch Transformer's eq. 4 (Fedus et al. 2021) of the shares of DeepSeek-V3's eqs 19 and 20, and
        ST-MoE's eq. 5 (Zoph et al. 2022).
        """
        gates = [inner.model.layers[self._last].mlp.gate for inner in self._inner]
        rows: list[list[torch.Tensor]] = [[] for _ in gates]
        for gate, seen in zip(gates, rows, strict=True):
            gate.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].flatten(0, -2)))
        for tokens, mask in samples:
            self._sample(torch.tensor(tokens), torch.tensor(mask))
        total = torch.zeros(())
        for gate, seen in zip(gates, rows, strict=True):
            logits = torch.cat(seen) @ gate.weight.T
            shares = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            chosen = torch.zeros_like(shares).scatter(1, shares.topk(gate.top_k).indices, 1.0)
            spread = len(gate.weight) * (chosen.mean(0) / gate.top_k * shares.mean(0)).sum()
            total = total + coefficient * spread + z_coefficient * logits.logsumexp(-1).square().mean()
        total.backward()
        return self._gradients()

    def _sample(self, tokens: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        """-log p of the predictions that count, of each depth."""
        with torch.no_grad():
            hidden = self.model.model(tokens[None]).last_hidden_state[0]
            embedded = self.model.get_input_embeddings()(tokens)
            head = self.model.get_output_embeddings().weight
        counts = torch.cat([torch.zeros(len(tokens) - len(mask)), mask]) > 0
        losses = []
        for depth, (own, inner) in enumerate(zip(self._own, self._inner, strict=True), start=1):
            if len(tokens) < depth + 1:
                break
            hidden = self._depth(own, inner, hidden[: len(tokens) - depth], embedded[depth:])
            log_probs = (hidden @ head.T).log_softmax(-1)[:-1]
            targets = tokens[depth + 1 :]
            losses.append(-log_probs.gather(-1, targets[:, None])[counts[depth + 1 :], 0])
        return losses

    def _depth(
        self, own: dict[str, torch.Tensor], inner: Any, hidden: torch.Tensor, embedded: torch.Tensor
    ) -> torch.Tensor:
        parts = [self._norm(embedded, own["embedding_norm"]), self._norm(hidden, own["hidden_norm"])]
        if self._names.hidden_first:
            parts.reverse()
        rows = (torch.cat(parts, dim=-1) @ own["projection"].T)[None]
        positions = torch.arange(rows.size(1))[None]
        angles = inner.model.rotary_emb(rows, positions)
        layer = inner.model.layers[self._last]
        out = layer(rows, attention_mask=None, position_ids=positions, position_embeddings=angles)
        return self._norm((out[0] if isinstance(out, tuple) else out)[0], own["last_norm"])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return x * scale * (weight + 1 if self._names.one_plus else weight)

    def _gradients(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for depth, (own, inner) in enumerate(zip(self._own, self._inner, strict=True)):
            of_own = {
                part: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for part, tensor in own.items()
            }
            found |= self._named(depth, of_own)
            # A checkpoint of gradients in the place of weights has the names, and experts one by one.
            shell = copy.deepcopy(inner)
            for of_shell, parameter in zip(shell.parameters(), inner.parameters(), strict=True):
                of_shell.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found |= self._named_layer(depth, self._of_layer(shell, self._path / f"gradients-{depth}"))
        return {name: gradient for name, gradient in found.items() if "correction_bias" not in name}


_NORMS = ("embedding_norm", "hidden_norm", "last_norm")
