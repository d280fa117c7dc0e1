"""Models of ``transformers``; those with sparse attention are computed sequence by sequence."""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.initialization import no_init_weights

from slime.backends.embedded_engine.adapters import Adapter
from slime.backends.embedded_engine.linear import RowLinear, linear
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.routes import RouteRecorder
from slime.backends.embedded_engine.row_attention import ATTENTION, Rows
from slime.backends.embedded_engine.row_experts import EXPERTS
from slime.backends.embedded_engine.row_states import GrowingStates
from slime.models import family_of
from slime.models.chosen_keys import choose_first_of_equals
from slime.models.hf_config import read_hf_config

_FLOAT32_BUFFER = "e_score_correction_bias"
_ROUTER = re.compile(r"layers\.(\d+)\..*")
_ROUTER_CLASS = "topkrouter"


def load_model(path: str | Path, config: ModelConfig) -> PreTrainedModel:
    """The model that config.json describes, its weights not set yet.

    Raises:
        ValueError: ``transformers`` does not know it.
    """
    hf_config = _hf_config(path, config)
    if attends_by_row(hf_config):
        hf_config._attn_implementation, hf_config._experts_implementation = ATTENTION, EXPERTS
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, dtype=config.dtype)
    model.tie_weights()
    choose_first_of_equals(model)
    for module in model.modules():
        if type(module) is torch.nn.Linear and hf_config._attn_implementation == ATTENTION:
            module.__class__ = RowLinear
        bias = getattr(module, _FLOAT32_BUFFER, None)
        if bias is not None:  # as in checkpoints and in the trainer, whatever the weights are
            setattr(module, _FLOAT32_BUFFER, bias.float())
    return model.eval().requires_grad_(False)


def _hf_config(path: str | Path, config: ModelConfig) -> PretrainedConfig:
    known_as = family_of(config.shape.model_type).known_to_transformers_as
    if known_as is None:
        # Of a larger model the language model alone, which takes tied embeddings from its own config.
        text = AutoConfig.from_pretrained(path).get_text_config()
        text.tie_word_embeddings = not config.shape.untie_embeddings_and_output_weights
        return text
    values = {
        name: value
        for name, value in read_hf_config(path).items()
        if name not in ("model_type", "auto_map", "architectures")
    }
    return AutoConfig.for_model(known_as, **values)


def attends_by_row(hf_config: PretrainedConfig) -> bool:
    """Whether a layer keeps nothing of a sequence but keys and values of tokens, or a state."""
    layers = DynamicCache(config=hf_config.get_text_config(decoder=True)).layers
    known = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
    return all(type(layer) in known for layer in layers)


def record_routes(config: ModelConfig, decoder: torch.nn.Module) -> RouteRecorder:
    """Has the routers of the layers with experts tell which ones they choose.

    Raises:
        ValueError: they are not of the kind that returns (logits, weights, experts).
    """
    moe = config.shape.moe
    assert moe is not None, "asked for routes of a model without experts"
    recorder, found = RouteRecorder(moe), []
    for name, module in decoder.named_modules():
        place = _ROUTER.search(name)
        if place and type(module).__name__.lower().endswith(_ROUTER_CLASS):
            found.append(int(place[1]))
            module.register_forward_hook(partial(_note, recorder, found[-1]))
    if sorted(found) != [layer for layer, kind in enumerate(moe.moe_layer_freq) if kind]:
        raise ValueError(
            f"--enable-return-routed-experts: transformers' {config.shape.model_type} does not tell which "
            f"experts it chooses (found routers of layers {sorted(found)})"
        )
    return recorder


def _note(
    recorder: RouteRecorder, layer: int, module: torch.nn.Module, inputs: Any, outputs: tuple[Any, ...]
) -> None:
    recorder.note(layer, outputs[2])


class TransformersLM:
    """The model, and a head whose rows do not depend on each other."""

    def __init__(self, config: ModelConfig, model: PreTrainedModel, records_routes: bool = False) -> None:
        self.config = config
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self.recorder = record_routes(config, self._decoder) if records_routes else None
        self.by_row = self._decoder.config._attn_implementation == ATTENTION
        self._linears = {
            name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
        }
        self._adapter: Adapter | None = None
        self._adds = False
        layers = self.new_states().layers
        self.has_states = any(isinstance(layer, LinearAttentionLayer) for layer in layers)

    @property
    def adapter(self) -> Adapter | None:
        """What is added to the output of its linear layers, by their names in ``transformers``."""
        return self._adapter

    @adapter.setter
    def adapter(self, adapter: Adapter | None) -> None:
        if adapter is not None and not self._adds:
            for name, module in self._linears.items():
                module.register_forward_hook(partial(self._add, name))
            self._adds = True
        self._adapter = adapter

    def _add(
        self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        part = self._adapter.parts.get(name) if self._adapter else None
        return output if part is None else output + part(inputs[0])

    def new_cache(self) -> DynamicCache:
        """An empty one for a sequence."""
        return DynamicCache(config=self._decoder.config)

    def forward(self, ids: list[int], start: int, cache: DynamicCache) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` of tokens ``start...`` of a sequence, earlier ones being cached."""
        out = self._decoder(
            input_ids=torch.tensor([ids], device=self.config.device),
            position_ids=torch.arange(start, start + len(ids), device=self.config.device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def new_states(self) -> GrowingStates:
        """Returns the states before the first token of a sequence."""
        return GrowingStates(config=self._decoder.config)

    def forward_rows(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: Rows, states: Any = None
    ) -> torch.Tensor:
        """Hidden states ``[B, T, hidden]`` of several sequences, whose cache is the business of ``rows``.

        Of a model that attends by row; ``states`` are those of its layers of linear attention.
        """
        out = self._decoder(
            input_ids=ids, position_ids=positions, past_key_values=states, use_cache=False, rows=rows
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` to ``[N, vocab]`` float32."""
        return linear(hidden, self._head.weight, self._head.bias).float()


class CacheRows:
    """A cache of ``transformers`` for each sequence, every layer of which keeps all tokens."""

    def __init__(self, new_cache: Callable[[], DynamicCache]) -> None:
        self.rows: list[DynamicCache] = []
        self._new_cache = new_cache

    def reserve(self, rows: int, length: int) -> None:
        """Caches grow by themselves."""
        del length
        self.rows += [self._new_cache() for _ in range(rows - len(self.rows))]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of a row over another row."""
        self.reserve(target + 1, length)
        self.rows[target] = _first_tokens(self.rows[source], length)

    def import_row(self, other: "CacheRows", target: int, length: int) -> None:
        """Copies the first ``length`` tokens of another cache's row 0, a prompt."""
        self.reserve(target + 1, length)
        self.rows[target] = _first_tokens(other.rows[0], length)

    def clear(self) -> None:
        """Frees everything."""
        self.rows.clear()


def _first_tokens(cache: DynamicCache, length: int) -> DynamicCache:
    """A copy that holds the first ``length`` tokens."""
    copy = deepcopy(cache)
    for layer in copy.layers:
        layer.crop(length - layer.get_seq_length())
    return copy


class TransformersExecutor:
    """Executes one sequence at a time, for layers whose indexer keys cannot be taken by row."""

    def __init__(self, model: TransformersLM) -> None:
        self.model = model
        self.cache = CacheRows(model.new_cache)
        self.device = model.config.device
        self.routes: torch.Tensor | None = None

    def new_cache(self, length: int) -> CacheRows:
        """Makes a cache for a prompt of that length that is computed alone, in chunks."""
        cache = CacheRows(self.model.new_cache)
        cache.reserve(1, length)
        return cache

    def prefill(self, prompts: list[list[int]], first_row: int) -> torch.Tensor:
        self.cache.reserve(first_row + len(prompts), 0)
        states, routes = [], []
        for row, prompt in enumerate(prompts, first_row):
            self.cache.rows[row] = self.model.new_cache()
            states.append(self.model.forward(prompt, 0, self.cache.rows[row]))
            routes += self._take_routes()
        if routes:
            self.routes = torch.nn.utils.rnn.pad_sequence(routes, batch_first=True)
        return torch.nn.utils.rnn.pad_sequence(states, batch_first=True)

    def prefill_chunk(self, ids: list[int], start: int, cache: CacheRows) -> torch.Tensor:
        """Computes tokens ``start...`` of row 0 of a cache of its own; returns ``[1, T, hidden]``."""
        hidden = self.model.forward(ids, start, cache.rows[0])[None]
        for routes in self._take_routes():
            self.routes = routes[None]
        return hidden

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, first_row: int, longest: int
    ) -> torch.Tensor:
        """One token for each of the rows ``first_row...``; returns hidden states ``[B, hidden]``.

        Args:
            ids: ``[B]`` newest token of each row.
            positions: ``[B]`` its position.
            first_row: cache row of the first one.
            longest: not needed.
        """
        del longest
        states, routes = [], []
        caches = self.cache.rows[first_row : first_row + len(ids)]
        for token, at, cache in zip(ids.tolist(), positions.tolist(), caches, strict=True):
            states.append(self.model.forward([token], at, cache))
            routes += self._take_routes()
        if routes:
            self.routes = torch.cat(routes)
        return torch.cat(states)

    def _take_routes(self) -> list[torch.Tensor]:
        """Takes the routes of the sequence that was just computed, ``[T, layers, top-k]``.

        Nothing if not recorded.
        """
        return [] if self.model.recorder is None else [self.model.recorder.take()]
