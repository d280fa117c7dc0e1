"""A checkpoint that looks real to the arguments, and the words of a command line that is in order."""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from slime.arguments import parse_args
from slime.arguments.validate.checkpoint_files import CHECKPOINT_MARKER
from slime.models import family_of, read_shape, shape_from_hf_config
from slime.models.checkpoint.tensor_shapes import TensorShapes
from tests.run_args import shape_with
from tools.make_tiny_model import make_config, make_tokenizer

_LARGEST_FILE = 8 << 30  # bytes; a file is mapped as a whole, and mappings beyond the memory are refused


def write_empty_weights(path: Path) -> None:
    """Safetensors files with every tensor of the directory's config.json, all zeros and none on the disk.

    Those whose shape is not known have no values.
    MTP layers are among them, as many as it says.
    """
    shape = shape_from_hf_config(path)
    args = shape_with(**shape, padded_vocab_size=shape["vocab_size"])
    config = json.loads((path / "config.json").read_text())
    further = config.get("num_nextn_predict_layers", 0)
    names = family_of(shape["model_type"]).weights.hf_names(args, further)
    shapes = TensorShapes(read_shape(path))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name in sorted(names):
        files[-1][name] = found = shapes.of(name) or (0,)
        size += 2 * math.prod(found)
        if size > _LARGEST_FILE:
            files.append({})
            size = 0
    for number, sizes in enumerate(files):
        _write_zeros(path / ("model.safetensors" if number == 0 else f"model-{number}.safetensors"), sizes)


def _write_zeros(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Writes a file as safetensors does, but without making a tensor of each of a hundred thousand names."""
    entries, end = {}, 0
    for name, size in shapes.items():
        start = end
        end += 2 * math.prod(size)
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(stream.tell() + end)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A Qwen3 of 3 layers, 4 heads, 2 key-value heads, vocabulary 320; its tensors are named but empty."""
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = make_tokenizer()
    make_config(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    write_empty_weights(path)
    return path


@pytest.fixture
def altered_checkpoint(checkpoint, tmp_path):
    """Makes copies of the checkpoint with other values in its config.json."""
    numbers = itertools.count()

    def alter(**values) -> Path:
        path = tmp_path / f"altered-{next(numbers)}"
        path.mkdir()
        for file in checkpoint.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        config = json.loads((path / "config.json").read_text()) | values
        (path / "config.json").write_text(json.dumps(config))
        return path

    return alter


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"{i}+1", "label": str(i + 1)}) + "\n" for i in range(4)))
    return path


@pytest.fixture
def words(checkpoint, data):
    """``words(save="x", seed=None, colocate=True)``: a good command line with some flags changed.

    None leaves a flag out, True gives it no value, a list gives it several.
    """

    def build(**changes) -> list[str]:
        flags = {
            "hf_checkpoint": checkpoint,
            "prompt_data": data,
            "label_key": "label",
            "rm_type": "math",
            "num_rollout": 2,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 16,
            "actor_num_gpus_per_node": 1,
            "colocate": True,
        } | changes
        if not {"global_batch_size", "num_steps_per_rollout"} & changes.keys():
            flags["num_steps_per_rollout"] = 1
        line: list[str] = []
        for name, value in flags.items():
            if value is None:
                continue
            values = [] if value is True else value if isinstance(value, list) else [value]
            line += ["--" + name.replace("_", "-"), *map(str, values)]
        return line

    return build


@pytest.fixture
def own_checkpoint(tmp_path):
    """A directory that looks like one of the trainer's checkpoints: iterations 1 and 3, the latest is 3."""
    path = tmp_path / "own"
    for iteration in ("iter_0000001", "iter_0000003"):
        (path / iteration).mkdir(parents=True)
        (path / iteration / "metadata.json").write_text("{}")
    (path / CHECKPOINT_MARKER).write_text("3")
    return path


@pytest.fixture
def notes(capsys):
    """``notes(words)``: what a good command line is told, without the prefix."""

    def read(line: list[str]) -> list[str]:
        parse_args(argv=line)
        printed = capsys.readouterr()
        assert printed.out == ""
        lines = printed.err.splitlines()
        assert all(text.startswith("note: ") for text in lines)
        return [text.removeprefix("note: ") for text in lines]

    return read


@pytest.fixture
def refusals(capsys):
    """``refusals(words)``: the lines that bad input gets, after the checks on how they are given."""

    def refuse(line: list[str]) -> list[str]:
        with pytest.raises(SystemExit) as stop:
            parse_args(argv=line)
        assert stop.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        lines = printed.err.splitlines()
        assert printed.err.endswith("\n") and lines
        assert all(text.startswith("error: ") for text in lines), f"said {printed.err!r}"
        return [text.removeprefix("error: ") for text in lines]

    return refuse


@pytest.fixture
def refusal(refusals):
    """``refusal(words)``: the one line that one mistake gets."""

    def refuse(line: list[str]) -> str:
        said = refusals(line)
        assert len(said) == 1, f"said {said!r}"
        return said[0]

    return refuse
