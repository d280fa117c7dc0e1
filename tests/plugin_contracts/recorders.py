"""One hook of each kind, with the documented signature and nothing more; each notes what it was given."""

from slime.rollout.sglang_rollout import generate as stock_generate
from slime.training.batch import REQUIRED

calls: list = []


async def generate(args, sample, sampling_params):
    calls.append(("generate", sample, sampling_params))
    return await stock_generate(args, sample, sampling_params)


async def rm(args, sample, **kwargs):
    calls.append(("rm", sample))
    return 1.0


async def group_rm(args, samples, **kwargs):
    calls.append(("group_rm", samples))
    return [1.0] * len(samples)


def dynamic_filter(args, group):
    calls.append(("dynamic_filter", group))
    return True


def buffer_filter(args, rollout_id, buffer, num_samples):
    calls.append(("buffer_filter", rollout_id, list(buffer), num_samples))
    return [buffer.pop(0)]


def sample_filter(args, groups):
    calls.append(("sample_filter", groups))


def all_samples(args, all_groups, get_samples):
    calls.append(("all_samples", all_groups, get_samples))


async def sample_hook(args, sample, *, rollout_id, evaluation):
    calls.append(("sample_hook", sample, rollout_id, evaluation))


def post_process(args, samples):
    calls.append(("post_process", samples))
    return [0.0] * len(samples), [1.0] * len(samples)


def convert(args, samples):
    calls.append(("convert", samples))
    own = {"tokens": [s.tokens for s in samples], "loss_masks": [[1] * s.response_length for s in samples]}
    return dict.fromkeys(REQUIRED, [0] * len(samples)) | own


def rollout_log(rollout_id, args, samples, extra_metrics, rollout_time):
    return False


def eval_log(rollout_id, args, data, extra_metrics):
    return False


def post_write(args, version_dir, rollout_engines):
    calls.append(("post_write", version_dir, rollout_engines))
