"""Routing replay: training sends tokens to the experts that were chosen for them before.

R2 (``--use-routing-replay``) replays the trainer's own choices, recorded in the pass that computes the old
log-probs. R3 (``--use-rollout-routing-replay``) replays the engine's, in that pass and in training. Only the
choice is replayed: the weights of the chosen experts are the router's, and its gradients flow through them.

`ReplayedChoice` takes the place of megatron-core's ``RouterReplay`` as the one that a router asks for
experts. That keeps what was recorded of one micro-batch only, and is told for all routers at once whether a
forward pass or a recomputation is under way, which in a pipeline take turns; it needs a route for each token.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config

from slime.backends.megatron_utils.moe import Router
from slime.training.routes import NO_ROUTE, packed_routes


class ReplayedChoice:
    """One router's.

    Attributes:
        layer: from 0, of the whole model.
        given: [tokens, top-k] int64, of the forward pass under way, `NO_ROUTE` where the router chooses;
            None if it chooses for all.
        chosen: [tokens, top-k] int64, the experts of the last forward pass or recomputation.
    """

    def __init__(self, layer: int, own: Any) -> None:
        self.layer, self._own = layer, own
        self.given: torch.Tensor | None = None
        self.chosen: torch.Tensor | None = None
        self._forward = False
        self._training = False
        self._to_recompute: deque[torch.Tensor] = deque()

    @contextmanager
    def forward(self, given: torch.Tensor | None, training: bool) -> Iterator[None]:
        """Around the forward pass of a micro-batch; what is asked outside of one is a recomputation."""
        self.given, self._forward, self._training = given, True, training
        try:
            yield
        finally:
            self.given, self._forward = None, False

    def forget(self) -> None:
        """What is left of micro-batches that nothing was recomputed of, as below frozen layers."""
        self.chosen = None
        self._to_recompute.clear()

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, default: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, experts) [tokens, top-k], as megatron-core's router asks for them."""
        choose = default if self._own is None else self._own.get_replay_topk
        further = () if self._own is None else (default,)
        values, self.chosen = choose(scores, topk, num_groups, group_topk, *further)
        given = self._routes()
        if given is not None:
            if given.shape != self.chosen.shape:
                found, wanted = list(given.shape), list(self.chosen.shape)
                raise RuntimeError(f"layer {self.layer}: routes of shape {found}, wanted {wanted}")
            self.chosen = torch.where(given == NO_ROUTE, self.chosen, given)
            values = scores.gather(1, self.chosen)
        return values, self.chosen

    def _routes(self) -> torch.Tensor | None:
        """Micro-batches are recomputed in the order of their forward passes, in every schedule."""
        if self._forward:
            # Without gradients in training: a checkpoint, which the backward pass computes again.
            if self._training and self.given is not None and not torch.is_grad_enabled():
                self._to_recompute.append(self.given)
            return self.given
        return self._to_recompute.popleft() if self._to_recompute else None


class RoutingReplay:
    """Replays the routes of all routers of a rank.

    Args:
        from_engine: R3; else R2.
    """

    def __init__(self, model: Sequence[torch.nn.Module], from_engine: bool) -> None:
        self.from_engine = from_engine
        self.fields = ("rollout_routed_experts",) if from_engine else ()
        """Fields of the batch, which micro-batches must have."""
        self._choices: dict[int, list[ReplayedChoice]] = {}
        self._recorded: dict[tuple[int, int], torch.Tensor] = {}
        for chunk in model:
            # Multi-token prediction (MTP) choose for themselves: engines return no routes of theirs.
            routers = [m for m in chunk.modules() if isinstance(m, Router) and m.layer_number is not None]
            self._choices[id(chunk)] = [self._of_router(router) for router in routers]

    @staticmethod
    def _of_router(router: Router) -> ReplayedChoice:
        assert router.layer_number is not None
        choice = ReplayedChoice(router.layer_number - 1, router.router_replay)
        router.router_replay = choice
        return choice

    @contextmanager
    def micro_batch(
        self, chunk: torch.nn.Module, batch: Mapping[str, Any], number: int, training: bool
    ) -> Iterator[None]:
        """Around the forward pass of a chunk over micro-batch ``number``, in training or before it."""
        choices, routes = self._choices[id(chunk)], None
        if self.from_engine:
            routes = self._of_engine(chunk, batch)
        elif training:
            routes = [self._recorded[choice.layer, number] for choice in choices]
        device = next(chunk.parameters()).device
        with ExitStack() as stack:
            for i, choice in enumerate(choices):
                given = None if routes is None else routes[i].to(device, torch.int64)
                stack.enter_context(choice.forward(given, training))
            yield
        if routes is None:
            for choice in choices:
                assert choice.chosen is not None
                self._recorded[choice.layer, number] = choice.chosen.to("cpu", torch.int16)

    def _of_engine(self, chunk: torch.nn.Module, batch: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns for each router of the chunk the routes of the tokens that this rank computes."""
        rows = packed_routes(batch["rollout_routed_experts"], batch["inputs"].split)
        if get_model_config(chunk).sequence_parallel:
            size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
            rows = rows.chunk(size)[rank]
        return [rows[:, choice.layer] for choice in self._choices[id(chunk)]]

    def forget_step(self) -> None:
        """Forgets the routes of an optimizer step."""
        for choices in self._choices.values():
            for choice in choices:
                choice.forget()

    def forget_rollout(self) -> None:
        """Forgets the routes of a rollout, after its last optimizer step."""
        self._recorded.clear()
