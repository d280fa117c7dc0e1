"""Where engines compute, and in what: what is refused before anything starts."""

import pytest
import yaml

from slime.arguments import validated_args
from slime.arguments.groups.engines import _float32_on_gpus
from slime.arguments.validate.served_models import SglangConfig


@pytest.fixture
def machine(monkeypatch):
    def has_gpu(gpu: bool) -> None:
        monkeypatch.setattr("slime.utils.accelerator.has_gpu", lambda: gpu)

    return has_gpu


def of_file(tmp_path, **overrides):
    groups = [{"worker_type": "regular", "num_gpus": 1, "overrides": overrides}]
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"sglang": [{"name": "policy", "server_groups": groups}]}))
    return path


@pytest.mark.parametrize(
    ("gpu", "device", "message"),
    [
        (False, "cuda", "--sglang-device cuda: this machine has no GPU (wanted: cpu, or leave it out)"),
        (
            True,
            "cpu",
            "--sglang-device cpu: a trainer on GPUs sends weights to GPUs (wanted: cuda, or leave it out)",
        ),
        (False, "cpu", None),
        (True, "cuda", None),
    ],
)
def test_an_engine_is_where_the_trainer_reaches_it(words, refusal, machine, gpu, device, message):
    machine(gpu)
    line = words(sglang_device=device)
    if message:
        assert refusal(line) == message
    else:
        assert validated_args(line).sglang_device == device


def test_without_a_trainer_an_engine_may_leave_the_gpu_alone(words, machine):
    machine(True)
    args = validated_args(words(sglang_device="cpu", debug_rollout_only=True))
    assert args.sglang_device == "cpu"


def test_a_device_of_a_group_is_looked_at_too(words, refusal, machine, tmp_path):
    machine(False)
    path = of_file(tmp_path, device="cuda")
    line = words(colocate=None, rollout_num_gpus=1, sglang_config=path)
    assert refusal(line) == (
        f"--sglang-config {path}: model policy: group 1: device cuda: this machine has no GPU "
        "(wanted: cpu, or leave it out)"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fp32": True}, "--fp32"),
        ({"fp32": True, "sglang_dtype": "auto"}, "--fp32"),
        ({"sglang_dtype": "float"}, "--sglang-dtype float"),
        ({"fp32": True, "sglang_dtype": "bfloat16"}, None),
        ({}, None),
    ],
)
def test_sglang_on_a_gpu_has_no_float32(words, machine, changes, named):
    machine(True)
    args = validated_args(words(fp32=changes.get("fp32")))
    args.sglang_dtype = changes.get("sglang_dtype")
    found = [*_float32_on_gpus(args)]
    assert [line.split(":")[0] for line in found] == ([named] if named else [])
    machine(False)
    assert [*_float32_on_gpus(args)] == []


def test_nor_has_a_group_of_it(words, machine, tmp_path):
    machine(True)
    path = of_file(tmp_path, dtype="float32")
    args = validated_args(words(colocate=None, rollout_num_gpus=1))
    args.fp32, args.sglang_config = False, str(path)
    args.served_models = [model.resolve(args) for model in SglangConfig.from_yaml(str(path)).models]
    (line,) = _float32_on_gpus(args)
    assert line.startswith(f"--sglang-config {path}: model policy: group 1: dtype float32: SGLang does not")
