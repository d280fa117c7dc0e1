"""Converts a Hugging Face directory to megatron-core's torch_dist format, for --load and --ref-load.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint Qwen3-4B --save Qwen3-4B_torch_dist
    torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py --tensor-model-parallel-size 8 ...

Writes SAVE/release and the marker beside it. Flags are those of train.py, as far as they are about the model
and its layout; without --bf16, --fp16 or --fp32 the number format is that of config.json. One process on a
CPU suffices. The trainer reads Hugging Face directories too, and needs no conversion.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.arguments import UsageError
from slime.arguments.model_only import model_args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 and one line on standard error for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        args = model_args(words, int(os.environ.get("WORLD_SIZE", "1")))
        if args.save is None:
            raise UsageError("--save: missing (wanted: the directory to write to)")
        from slime.backends.megatron_utils.convert import write_torch_dist  # takes seconds

        written = write_torch_dist(args, args.save)
    except (UsageError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":
        print(f"{written}: the weights of {args.hf_checkpoint}, {args.params_dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
