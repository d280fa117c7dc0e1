"""What is wrong with ``--eval-model``, one line each."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import given
from slime.config.served_models import ServedModelConfig

REFUSED = {
    "colocate": "evaluations beside training need GPUs that are never the trainer's",
    "policies": "an evaluation is of one policy",
    "debug_rollout_only": "there is no trainer, whose weights it would take",
    "rollout_external": "its engines are started by the run",
    "rollout_external_engine_addrs": "its engines are started by the run",
}


def bad_eval_model(args: Namespace) -> Iterator[str]:
    """Runs that cannot evaluate beside training, and models that cannot be asked then."""
    where = f"--eval-model {args.eval_model}"
    if args.eval_interval is None:
        yield f"{where}: needs --eval-interval"
    if refused := [*given(args, *REFUSED)]:
        yield from (f"{option}: not with --eval-model: {REFUSED[_dest(option)]}" for option, _ in refused)
        return
    if args.update_weight_mode == "delta":
        yield f"{where}: with --update-weight-mode delta, which each engine takes part in (wanted: full)"
    if args.asynchronous and args.update_weights_interval != 1:
        interval = args.update_weights_interval
        yield f"{where}: with --update-weights-interval {interval}, which sends no weights to it (wanted: 1)"
    yield from _bad_model(where, args.eval_model, args.served_models)


def _dest(option: str) -> str:
    return option[2:].replace("-", "_")


def _bad_model(where: str, name: str, models: list[ServedModelConfig]) -> Iterator[str]:
    model = next((model for model in models if model.name == name), None)
    if model is None:
        others = " or ".join(other.name for other in models[1:])
        yield f"{where}: no model of that name is served (wanted: {others or 'one of --sglang-config'})"
    elif model is models[0]:
        yield f"{where}: it comes first, and the first one makes the rollouts (wanted: another model)"
    elif not model.update_weights:
        yield f"{where}: it takes no updates (wanted: update_weights: true)"
    elif model.update_interval is not None:
        yield (
            f"{where}: update_interval {model.update_interval}: it takes the weights of each evaluation "
            "(wanted: no update_interval)"
        )
