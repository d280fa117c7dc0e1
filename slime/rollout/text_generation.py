"""Generation for rollout code that knows texts only: text in, the sampled tokens out.

--custom-generate-function-path slime.rollout.text_generation.generate
--use-slime-router
--slime-router-middleware-paths slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware

The default `slime.rollout.generation.generate` keeps tokens itself and needs none of this.
"""

from typing import Any

from slime.config.slime_router import SlimeRouterConfig
from slime.rollout.base_types import RolloutError
from slime.rollout.generate_state import GenerateState, decoder
from slime.rollout.generation import get_model_url, made_before, read_output_tokens
from slime.router.middleware_hub.radix_tree_middleware import postprocess_sample_with_radix_tree
from slime.router.middleware_hub.token_runs import TokenRun
from slime.utils.cut_stops import PARTED, StopsAcrossCuts
from slime.utils.engine_meta import asks_for_nuclei
from slime.utils.http_utils import post
from slime.utils.types import Sample

_RETRIES = 20
_MIDDLEWARE = "RadixTreeMiddleware"
_LOOKED_AT = 8


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Lets the engine go on with ``sample.prompt + sample.response``, and fills in tokens and the rest.

    Raises:
        RolloutError: the router does not keep tokens.
    """
    if not remembers_tokens(args):
        raise RolloutError(
            "generation from text: tokens would not be those that were sampled (wanted: --use-slime-router "
            "and --slime-router-middleware-paths "
            f"slime.router.middleware_hub.radix_tree_middleware.{_MIDDLEWARE})"
        )
    params = {key: value for key, value in sampling_params.items() if value is not None}
    params["max_new_tokens"] -= sample.response_length
    if params["max_new_tokens"] <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    text = f"{sample.prompt}{sample.response}"
    payload = {"text": text, "sampling_params": params, **asks_for_nuclei(params)}
    headers = {"X-SMG-Routing-Key": sample.session_id} if sample.session_id else None
    output = await post(get_model_url(args), payload, _RETRIES, headers=headers)
    _end_at_cut_stop(args, sample, output, params)
    return await postprocess_sample_with_radix_tree(args, sample, output)


def _end_at_cut_stop(
    args: Any, sample: Sample, output: dict[str, Any], sampling_params: dict[str, Any]
) -> None:
    """Ends an answer with a stop string that began before an abort: the engine saw the rest of it alone."""
    before, (tokens, log_probs) = made_before(sample), read_output_tokens(output)
    if not (before and sampling_params.get("stop")):
        return
    text_of = decoder(args, sampling_params)
    said = text_of(before[-_LOOKED_AT:]).strip(PARTED)
    if not sample.response.rstrip(PARTED).endswith(said):
        return  # a tool's text came between
    if StopsAcrossCuts(sampling_params["stop"], text_of).note(before, output):
        mask, tokenizer = [1] * len(tokens), GenerateState(args).tokenizer
        whole = TokenRun.of(output["text"], tokens, log_probs, mask, tokenizer)
        output["text"] = whole.head(output["meta_info"]["completion_tokens"]).text


def remembers_tokens(args: SlimeRouterConfig) -> bool:
    """Whether the router of this run knows the tokens of a text."""
    names = [path.rpartition(".")[2] for path in args.slime_router_middleware_paths]
    return args.use_slime_router and _MIDDLEWARE in names
