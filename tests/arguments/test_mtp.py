"""Flags of MTP layers: what trains them, and why they may not be trained."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.arguments import validated_args
from slime.config.mtp import MtpConfig
from slime.config.run import filled
from slime.models.mtp import trained_mtp_layers
from tests.arguments.conftest import write_empty_weights
from tests.families import save_tiny_config
from tools.make_tiny_model import make_tokenizer

TRAINED = {"mtp_num_layers": 1, "enable_mtp_training": True}


@pytest.fixture
def model_with_layers(tmp_path):
    """``model_with_layers("mimo", 1)``: a directory whose config.json says so, with names of all tensors."""

    def write(name, layers, **changes):
        path = save_tiny_config(name, tmp_path / name, vocab_size=512, **changes)
        make_tokenizer().save_pretrained(path)
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": layers}))
        write_empty_weights(path)
        return path

    return write


def test_they_train_with_both_flags(words, notes, model_with_layers):
    line = words(hf_checkpoint=model_with_layers("mimo", 2), **TRAINED)
    args = validated_args(line)
    assert trained_mtp_layers(filled(MtpConfig, args)) == 1
    assert args.mtp_loss_scaling_factor == 0.2  # the original's default
    assert notes(line) == []


def test_a_number_alone_has_no_effect_and_gets_a_note(words, notes, model_with_layers):
    line = words(hf_checkpoint=model_with_layers("mimo", 1), mtp_num_layers=1)
    (note,) = notes(line)
    assert note.startswith("--mtp-num-layers 1: has no effect without --enable-mtp-training")
    assert trained_mtp_layers(filled(MtpConfig, validated_args(line))) == 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mimo", {"mtp_num_layers": None}, "--enable-mtp-training: wanted --mtp-num-layers 1"),
        (
            "mimo",
            {"mtp_num_layers": 3},
            "--mtp-num-layers 3: config.json of --hf-checkpoint says num_nextn_predict_layers 2",
        ),
        ("qwen3_next", {"mtp_num_layers": 2}, "--mtp-num-layers 2: checkpoints of qwen3_next have one"),
        ("glm4", {}, "--enable-mtp-training: glm4 has no such layers that are known (wanted: one of "),
        ("mimo", {"fp32_residual_connection": True, "bf16": True}, "--enable-mtp-training: not with --fp32-"),
        (
            "mimo",
            {"custom_model_provider_path": "tests.arguments.test_mtp.provide"},
            "--enable-mtp-training: not with --custom-model-provider-path",
        ),
    ],
)
def test_what_cannot_train_them_is_named(words, refusal, model_with_layers, name, changes, message):
    path = model_with_layers(name, 0 if name == "glm4" else 2)
    assert refusal(words(hf_checkpoint=path, **(TRAINED | changes))).startswith(message)


def provide():
    """A model provider."""


def test_a_checkpoint_without_their_tensors_is_refused(words, refusal, model_with_layers):
    path = model_with_layers("deepseek_v3", 0)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    message = refusal(words(hf_checkpoint=path, **TRAINED))
    assert message.startswith(f"--hf-checkpoint {path}: ")
    assert "tensors of config.json are missing, e.g. model.layers.4.eh_proj.weight" in message


def test_what_the_actor_may_start_with_needs_their_tensors(words, refusal, model_with_layers, tmp_path):
    whole, plain = model_with_layers("mimo", 1), tmp_path / "plain"
    shutil.copytree(whole, plain)
    with safe_open(whole / "model.safetensors", "pt") as stored:
        kept = {name: torch.empty(0) for name in stored.keys() if "mtp" not in name}  # noqa: SIM118
    save_file(kept, plain / "model.safetensors")
    message = refusal(words(hf_checkpoint=whole, ref_load=plain, **TRAINED))
    assert message.startswith(f"--ref-load {plain}: ")
    assert "tensors of config.json are missing, e.g. model.mtp_layers.0." in message
