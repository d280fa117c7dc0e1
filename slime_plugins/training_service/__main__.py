"""A training service: programs elsewhere train the adapters of a run and sample with them, over HTTP.

    python -m slime_plugins.training_service --service-port 8890 \\
        --hf-checkpoint MODEL --lora-rank 16 --no-lora-merge --lora-adapters alice bob \\
        --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --max-tokens-per-gpu 8192

All other flags are those of a run. It listens on this machine alone unless told otherwise. Requests bring
``--sglang-api-key``, or the environment's SLIME_API_KEY, as a bearer token; pages of other sites are refused.
"""

import argparse
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from slime.arguments.core.flag import option_string
from slime.ray.session import main as run_session
from slime.utils.addresses import API_KEY

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.config.run import RunConfig
    from slime.observability.run_log import RunLog
    from slime.ray.rollout_group import RolloutGroup
    from slime.ray.train_group import RayTrainGroup

LOOK_S = 5.0
"""How often it is looked whether all of the run lives."""
# No prompts and no rollouts; a step of a rollout's size, which is only checked; gradients that are not finite
# are the tenant's fault and end nothing.
_OF_SERVICE = (
    *("--num-rollout", "0", "--rollout-batch-size", "1", "--n-samples-per-prompt", "4096"),
    *("--global-batch-size", "4096", "--use-dynamic-batch-size", "--no-check-for-nan-in-loss-and-grad"),
    *("--rollout-max-response-len", "1"),
)
_ONLY = {
    "train_backend": ("megatron", "the other trainer keeps no gradients of tenants"),
    "optimizer": ("adam", "steps are Adam's"),
    "use_stateless_adam": (False, "steps are Adam's"),
    "asynchronous": (False, "it has no loop"),
    "fp16": (False, "gradients are kept for longer than a loss scale holds"),
    "calculate_per_token_loss": (False, "losses are sums"),
    "recompute_loss_function": (False, "losses tell their log-probs"),
    "colocate": (False, "trainer and engines work at once"),
    "debug_train_only": (False, "there would be no engines"),
    "debug_rollout_only": (False, "there would be no trainer"),
    "use_kl_loss": (False, "tenants choose their losses"),
    "policies": (None, "all tenants have one base"),
    "num_experts": (None, "losses of routers are no tenant's"),
}


def refusal(args: Namespace) -> Iterator[str]:
    """What a run of tenants cannot be."""
    if not args.lora_adapters:
        yield "--lora-adapters: missing (wanted: the names of the tenants)"
    for name, (idle, why) in _ONLY.items():
        if (found := getattr(args, name, idle)) and found != idle:
            yield f"{option_string(name)} {found}: not in a training service ({why})"


def serve(
    host: str,
    port: int,
    deadline_s: float,
    config: "RunConfig",
    actor: "RayTrainGroup",
    critic: "RayTrainGroup",
    rollout: "RolloutGroup",
    log: "RunLog",
) -> None:
    """Serves until the run ends.

    Raises:
        Exception: what ended the trainer's work, or an engine.
    """
    import uvicorn

    from slime_plugins.training_service.app import create_app
    from slime_plugins.training_service.sampling import EngineSampler
    from slime_plugins.training_service.tenants import Tenants

    tenants, key = Tenants(config, actor), config.router.sglang_api_key
    tenants.begin()
    app = create_app(tenants, EngineSampler(rollout.router_url(), key), host, key, deadline_s)
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, name="service", daemon=True)
    thread.start()
    print(f"training service: http://{host}:{port}, tenants {', '.join(tenants.names)}", flush=True)
    while not tenants.ended.wait(LOOK_S):
        rollout.check()
        if not thread.is_alive():
            raise RuntimeError(f"the service at {host}:{port} has ended")
    server.should_exit = True
    thread.join(LOOK_S)  # whoever asked is told
    assert tenants.failure is not None
    raise tenants.failure


def own_parser() -> argparse.ArgumentParser:
    """The flags that a run does not have."""
    parser = argparse.ArgumentParser(
        "slime_plugins.training_service",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--service-host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--service-port", type=int, default=8890, help="port to listen on")
    parser.add_argument("--service-deadline", type=float, default=3600.0, help="seconds of one request")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    own, words = own_parser().parse_known_args(sys.argv[1:] if argv is None else argv)

    def refused(args: Namespace) -> Iterator[str]:
        yield from refusal(args)
        if args.sglang_api_key is None:
            yield f"--sglang-api-key: missing (wanted: a key of the service, or {API_KEY} in the environment)"

    loop = partial(serve, own.service_host, own.service_port, own.service_deadline)
    run_session(loop, refused, argv=[*words, *_OF_SERVICE])


if __name__ == "__main__":
    main()
