"""From Hugging Face to torch_dist and back, bit for bit, in one process each.

One model takes them as they are called; the others' processes are forked, without seconds of imports.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.models.checkpoint.weights_dir import WeightsReader
from tests.families import tiny_family
from tests.forking import ForkedScript
from tests.megatron_harness import save_tiny_hf, tiny_hf_model
from tests.page_runs import printed
from tools.convert_hf_to_mxfp4 import main as to_mxfp4

ROOT = Path(__file__).parents[2]


def called(name, *words):
    command = [sys.executable, ROOT / "tools" / name, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd="/")
    return done.returncode, done.stdout, done.stderr


def forked(name, *words):
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        status = ForkedScript(ROOT / "tools" / name, [*map(str, words)], out, err, cwd="/").wait(600)
        return status, out.read_text(), err.read_text()


@pytest.fixture(
    scope="module",
    params=[
        "qwen3 in bfloat16",
        pytest.param("llama", marks=pytest.mark.slow),
        "qwen3_5_moe",
        "qwen3_moe",
    ],
)
def source(request, tmp_path_factory):
    """A model with a vocabulary that is padded on the way."""
    path = tmp_path_factory.mktemp("source")
    if request.param == "qwen3_moe":
        return Path(save_tiny_hf(path, request.param, vocab_size=250))
    if request.param == "qwen3_5_moe":  # beside a tower for images, which is carried over
        tiny_family(request.param, path, vocab_size=250)
        return path
    tiny_hf_model("qwen3", vocab_size=250).to(torch.bfloat16).save_pretrained(path)
    return path


def test_there_and_back_is_the_same_to_the_last_bit(source, tmp_path, request):
    tool = called if request.node.callspec.params["source"] == "llama" else forked
    saved, exported = tmp_path / "torch_dist", tmp_path / "exported"
    flags = ("--num-layers", 4, "--vocab-size", 250, "--swiglu", "--expert-tensor-parallel-size", 1)
    status, printed, said = tool(
        "convert_hf_to_torch_dist.py", "--hf-checkpoint", source, "--save", saved, *flags
    )
    assert (status, said.count("error")) == (0, 0), said
    assert printed.startswith(f"{saved}/release: the weights of {source}")
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = ("--origin-hf-dir", source, "--output-dir", exported, "--chunk-size", 50_000)
    status, printed, said = tool("convert_torch_dist_to_hf.py", "--input-dir", saved / "release", *back)
    assert status == 0, said
    before = load_file(source / "model.safetensors")
    index = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    files = set(index.values())
    after = {name: tensor for file in files for name, tensor in load_file(exported / file).items()}
    assert len(files) > 1
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    status, _, said = forked("convert_torch_dist_to_hf.py", "--input-dir", saved, *back)
    assert status == 2 and "is not empty (wanted: another, or --force)" in said


def test_of_a_quantised_directory_come_the_dequantised_weights(tmp_path):
    plain, packed, saved, exported = (tmp_path / name for name in ("plain", "packed", "saved", "exported"))
    tiny_family("gpt_oss", plain, num_hidden_layers=2)
    assert to_mxfp4(["--model-dir", str(plain), "--save-dir", str(packed)]) == 0
    here = {"HF": packed, "DIR": saved, "OUT": exported}
    there, back = (
        *printed("python tools/convert_hf_to_torch_dist.py"),
        *printed("python tools/convert_torch_dist_to_hf.py"),
    )
    for command in (there, back):
        words = [here.get(word, word) for word in command.words[2:]]
        status, _, said = forked(Path(command.words[1]).name, *words)
        assert status == 0, said
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    with WeightsReader(packed) as before, WeightsReader(exported) as after:
        assert before.quantized and {*after.names()} == {*before.names()}
        assert all(torch.equal(after.read(name), before.read(name)) for name in before.names())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("model"), "llama", vocab_size=250)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--save", "x"], "error: --hf-checkpoint: missing"),
        (["--hf-checkpoint", "/none", "--save", "x"], "error: --hf-checkpoint /none: "),
        (["--hf-checkpoint", "{model}"], "error: --save: missing (wanted: the directory to write to)"),
        (
            ["--hf-checkpoint", "{model}", "--save", "x", "--num-layers", "7"],
            "error: --num-layers 7: config.json of --hf-checkpoint says 4",
        ),
    ],
)
def test_bad_input_of_the_first_is_one_line(model, words, said, capsys):
    from tools.convert_hf_to_torch_dist import main

    assert main([word.format(model=model) for word in words]) == 2
    assert_one_line(capsys, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model-name", "glm4"], "error: --model-name glm4: config.json says "),
        (["--vocab-size", "256"], "error: --vocab-size 256: config.json says 250"),
        ([], "no torch_dist checkpoint, or an incomplete one"),
    ],
)
def test_bad_input_of_the_second_is_one_line(model, words, said, tmp_path, capsys):
    from tools.convert_torch_dist_to_hf import main

    given = ["--input-dir", tmp_path, "--output-dir", tmp_path / "out", "--origin-hf-dir", model]
    assert main([*map(str, given), *words]) == 2
    assert_one_line(capsys, said)


def assert_one_line(capsys, said):
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "1 tensors are missing, e.g. model.norm.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}),
            "model.norm.weight [63] give [63] for decoder.final_layernorm.weight, wanted [64]",
        ),
    ],
)
def test_a_source_that_does_not_fit_is_one_line_and_leaves_no_checkpoint(model, change, said, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    shutil.copytree(model, source)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    status, _, error = forked("convert_hf_to_torch_dist.py", "--hf-checkpoint", source, "--save", saved)
    assert status == 2
    assert error.splitlines()[-1] == f"error: {source}: {said}"
    assert not (saved / "latest_checkpointed_iteration.txt").exists()
