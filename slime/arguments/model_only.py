"""The flags of a model without a run: what the converters of checkpoints read."""

from argparse import Namespace
from collections.abc import Sequence

from slime.arguments.core.errors import UsageError
from slime.arguments.groups import compute, model_shape, moe, mtp, parallelism, precision
from slime.models import HfConfigError
from slime.models.hf_config import HfConfig

_CONFIG_GROUPS = (
    *(model_shape.CONFIG_GROUP, precision.CONFIG_GROUP, parallelism.CONFIG_GROUP),
    *(moe.CONFIG_GROUP, mtp.CONFIG_GROUP, compute.CONFIG_GROUP),
)
_DTYPE_FLAGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def model_args(words: Sequence[str], world_size: int) -> Namespace:
    """Shape, number format and layout of a model, from flags of ``train.py``.

    Without a flag for the number format it is that of config.json.

    Args:
        words: of a command line with ``--hf-checkpoint``.
        world_size: processes of the conversion.

    Raises:
        UsageError: bad input, with one line that names it.
    """
    from slime.arguments.core.parser import parse

    # A run needs it, a model does not.
    args = parse([*words, "--rollout-batch-size", "1"], None)
    args.trainer_world_size = world_size
    try:
        if not (args.bf16 or args.fp16 or args.fp32):
            setattr(args, _dtype_flag(args.hf_checkpoint), True)
    except HfConfigError as error:
        raise UsageError(f"--hf-checkpoint {args.hf_checkpoint}: {error}") from error
    for group in _CONFIG_GROUPS:
        group.derive(args)
    for group in _CONFIG_GROUPS:
        for message in group.contradictions(args):
            raise UsageError(message)
    return args


def _dtype_flag(path: str) -> str:
    return _DTYPE_FLAGS.get(str(HfConfig.read(path).dtype), "bf16")
