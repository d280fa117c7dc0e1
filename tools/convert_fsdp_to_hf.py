"""Makes a Hugging Face directory of a checkpoint that --train-backend fsdp has saved.

    python tools/convert_fsdp_to_hf.py --input-dir SAVE/iter_0000007 --output-dir OUT --origin-hf-dir MODEL

The shards of all ranks are merged on this machine's host memory; no GPU and no other process is needed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slime.adapters.record import require_all_weights
from slime.backends.fsdp_utils.checkpoint import read_metadata
from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors
from slime.backends.fsdp_utils.model import empty_model
from slime.backends.fsdp_utils.named_tensors import named_tensors
from slime.backends.fsdp_utils.value_head import is_of_value_head
from slime.models.hf_config import HfConfig
from slime.training.checkpoint_dir import MARKER, find_checkpoint
from slime.training.hf_export import ExportBase, save_hf_model_to_path
from slime.utils import safe_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def merge(source: Path, target: Path, origin: Path, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Writes the weights of the iteration at ``source``, with config and tokenizer of ``origin``.

    Raises:
        ValueError: ``source`` is no checkpoint of this trainer, or one of adapters; ``target`` is ``origin``.
    """
    safe_checkpoint.install()
    if (source / MARKER).is_file():
        source = find_checkpoint(source)[1]
    require_all_weights(read_metadata(source)["common"], source)
    if _is_of_critic(source / "model"):
        raise ValueError(f"{source}: is a critic's (wanted: an actor's, that is a language model)")
    model = empty_model(origin, trust_remote_code)
    dcp.load({name: tensor.detach() for name, tensor in named_tensors(model)}, checkpoint_id=source / "model")
    save_hf_model_to_path(ExportBase(origin, dtype), target, FsdpHfTensors(model, dtype))


def _is_of_critic(weights: Path) -> bool:
    saved = dcp.FileSystemReader(weights).read_metadata().state_dict_metadata
    return any(map(is_of_value_head, saved))


def dtype_of(origin: Path) -> str:
    """The format that the config of a directory names; float32 without one."""
    name = HfConfig.read(origin).dtype or "float32"
    return name if name in DTYPES else "float32"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input-dir", type=Path, required=True, help="iter_* directory, or --save of the run"
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to make")
    parser.add_argument("--origin-hf-dir", type=Path, required=True, help="--hf-checkpoint of the run")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default that of --origin-hf-dir")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    args = parser.parse_args(argv)
    # The export speaks to the ranks of a trainer; here there is one.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dtype = DTYPES[args.dtype or dtype_of(args.origin_hf_dir)]
        merge(args.input_dir, args.output_dir, args.origin_hf_dir, dtype, args.trust_remote_code)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
