"""Serves log-probs of a Megatron model.

    python -m slime.backends.megatron_utils.server --hf-checkpoint Qwen3-4B --teacher-port 7999
    torchrun --nproc-per-node 8 -m slime.backends.megatron_utils.server --tensor-model-parallel-size 8 ...

Flags are those of train.py, as far as they are about the model and its layout, and those of the server.
Weights are those of --load, a Hugging Face directory or a Megatron checkpoint, else those of --hf-checkpoint.
"""

import logging
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from slime.arguments.core.errors import UsageError
from slime.arguments.model_only import model_args
from slime.backends.megatron_utils.server.arguments import (
    add_megatron_server_arguments,
    configure_megatron_server_args,
    validate_megatron_server_args,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 and one line on standard error for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = ArgumentParser(
            "slime.backends.megatron_utils.server",
            description=__doc__,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        own, rest = add_megatron_server_arguments(parser).parse_known_args(words)
        args = model_args(rest, int(os.environ.get("WORLD_SIZE", "1")))
        vars(args).update(vars(own))
        validate_megatron_server_args(configure_megatron_server_args(args))
        from slime.backends.megatron_utils.server.launch import launch  # takes seconds

        logging.basicConfig(level=logging.INFO)
        launch(args)
    except (UsageError, OSError, ValueError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
