"""Converts a checkpoint in megatron-core's torch_dist format to a Hugging Face directory.

    python tools/convert_torch_dist_to_hf.py --input-dir run/iter_0000100 --output-dir exported \\
        --origin-hf-dir Qwen3-4B

Config and tokenizer are those of --origin-hf-dir, the number format is that of the checkpoint. One process on
a CPU suffices, whatever layout wrote the checkpoint.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.arguments import UsageError
from slime.arguments.model_only import model_args

SHARD_BYTES = 2 * 1024**3


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 and one line on standard error for bad input."""
    options = _parser().parse_args(argv)
    try:
        _convert(options)
    except (UsageError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output_dir}: the weights of {options.input_dir}")
    return 0


def _convert(options: argparse.Namespace) -> None:
    if options.output_dir.exists() and any(options.output_dir.iterdir()) and not options.force:
        raise UsageError(f"--output-dir {options.output_dir}: is not empty (wanted: another, or --force)")
    words = ["--hf-checkpoint", str(options.origin_hf_dir)]
    _agree(options, vars(model_args(words, 1)))
    from slime.backends.megatron_utils.convert import dtype_of, find_weights, write_hf  # takes seconds

    source = find_weights(options.input_dir)
    dtype = {"torch.bfloat16": "--bf16", "torch.float16": "--fp16"}.get(str(dtype_of(source)), "--fp32")
    write_hf(model_args([*words, dtype], 1), source, options.output_dir, options.chunk_size)


def _agree(options: argparse.Namespace, model: dict[str, object]) -> None:
    """Options that say what config.json says must say the same."""
    if options.model_name is not None and str(model["model_type"]) not in options.model_name.lower():
        raise UsageError(f"--model-name {options.model_name}: config.json says {model['model_type']}")
    if options.vocab_size not in (None, model["vocab_size"]):
        raise UsageError(f"--vocab-size {options.vocab_size}: config.json says {model['vocab_size']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input-dir", type=Path, required=True, help="iteration, release, or their parent")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to write")
    parser.add_argument("--origin-hf-dir", type=Path, required=True, help="has config and tokenizer")
    parser.add_argument("--model-name", help="checked against config.json, which names the model")
    parser.add_argument("--vocab-size", type=int, help="checked against config.json, which has it")
    parser.add_argument(
        "--chunk-size", type=int, default=SHARD_BYTES, help="most bytes of a file, which are held in memory"
    )
    parser.add_argument("-f", "--force", action="store_true", help="write over an export that is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
