"""A run does not write over what it reads, nor where another server listens."""

import contextlib
import socket

import pytest
import torch

from slime.arguments import validated_args


@pytest.fixture
def places(tmp_path, data, checkpoint, own_checkpoint):
    """The words that tests fill in."""
    (tmp_path / "link.jsonl").symlink_to(data)
    (tmp_path / "hard.jsonl").hardlink_to(data)
    (tmp_path / "eval.yaml").write_text(f"datasets: [{{name: held_out, path: {data}}}]")
    (tmp_path / "extra.yaml").write_text("mine: 1")
    torch.save({}, tmp_path / "dump_0.pt")
    (tmp_path / "rollout_data").mkdir()
    torch.save({}, tmp_path / "rollout_data" / "0.pt")
    (tmp_path / "7.jsonl").write_text(data.read_text())
    return {"tmp": tmp_path, "data": data, "model": checkpoint, "own": own_checkpoint}


def filled(changes, places):
    return {k: v.format(**places) if isinstance(v, str) else v for k, v in changes.items()}


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        (dict(metrics_file="{data}"), "--metrics-file {data}: would overwrite --prompt-data"),
        (dict(metrics_file="{data}", prompt_data="{data}@[0:4]"), "--metrics-file {data}: would overwrite"),
        (dict(metrics_file="{tmp}/link.jsonl"), "--metrics-file {tmp}/link.jsonl: would overwrite --prompt-"),
        (dict(metrics_file="{tmp}/hard.jsonl"), "--metrics-file {tmp}/hard.jsonl: would overwrite --prompt-"),
        (dict(metrics_file="{tmp}/./prompts.jsonl"), "--metrics-file {tmp}/./prompts.jsonl: would overwrite"),
        (
            dict(save_debug_rollout_data="{data}"),
            "--save-debug-rollout-data {data}: would overwrite --pro",
        ),
        (dict(save_debug_train_data="{data}"), "--save-debug-train-data {data}: would overwrite --prompt"),
        (
            dict(prompt_data="{tmp}/7.jsonl", save_debug_train_data="{tmp}/{{rollout_id}}.jsonl"),
            "--save-debug-train-data {tmp}/{{rollout_id}}.jsonl: would overwrite --prompt-data",
        ),
        (
            dict(metrics_file="{data}", prompt_data=None, num_rollout=0, eval_config="{tmp}/eval.yaml"),
            "--metrics-file {data}: would overwrite eval dataset held_out",
        ),
        (
            dict(metrics_file="{tmp}/eval.yaml", eval_config="{tmp}/eval.yaml"),
            "--metrics-file {tmp}/eval.yaml: would overwrite --eval-config",
        ),
        (
            dict(metrics_file="{tmp}/extra.yaml", custom_config_path="{tmp}/extra.yaml"),
            "--metrics-file {tmp}/extra.yaml: would overwrite --custom-config-path",
        ),
        (
            dict(
                load_debug_rollout_data="{tmp}/dump_{{rollout_id}}.pt",
                save_debug_rollout_data="{tmp}/dump_{{rollout_id}}.pt",
            ),
            "--save-debug-rollout-data {tmp}/dump_{{rollout_id}}.pt: would overwrite --load-debug-rollout-d",
        ),
        (
            dict(load_debug_rollout_data="{tmp}/rollout_data/{{rollout_id}}.pt", dump_details="{tmp}"),
            "--dump-details {tmp}/rollout_data/{{rollout_id}}.pt: would overwrite --load-debug-rollout-data",
        ),
        (dict(metrics_file="{model}/config.json"), "--metrics-file {model}/config.json: is a file of --hf-c"),
        (dict(metrics_file="{tmp}/m", save_debug_train_data="{tmp}/m"), "--metrics-file and --save-debug-tr"),
        (
            dict(save_debug_rollout_data="{tmp}/d", save_debug_train_data="{tmp}/d"),
            "--save-debug-rollout-data and --save-debug-train-data: the same file",
        ),
        (dict(save="{model}", save_interval=1), "--save {model}: would write over --hf-checkpoint"),
        (
            dict(save="{model}/../{model.name}", save_interval=1),
            "--save {model}/../{model.name}: would write over --hf-checkpoint",
        ),
        (dict(save="{own}", ref_load="{own}", save_interval=1), "--save {own}: would write over --ref-load"),
        (
            dict(save="{own}", ref_load="{own}", ref_ckpt_step=1, save_interval=1, keep_checkpoints=2),
            "--keep-checkpoints 2: would remove iteration 1 of --ref-load",
        ),
        (
            dict(
                **dict(save="{own}", save_interval=1, keep_checkpoints=2, use_opd=True, opd_type="megatron"),
                **dict(opd_teacher_load="{own}", opd_teacher_ckpt_step=1),
            ),
            "--keep-checkpoints 2: would remove iteration 1 of --opd-teacher-load",
        ),
        (dict(save_hf="{model}", save_interval=1), "--save-hf {model}: would overwrite --hf-checkpoint"),
        (dict(save_hf="{own}", load="{own}", save_interval=1), "--save-hf {own}: would overwrite --load"),
    ],
)
def test_an_output_that_is_an_input_is_refused(words, refusal, places, changes, start):
    assert refusal(words(**filled(changes, places))).startswith(start.format(**places))


@pytest.mark.parametrize(
    "changes",
    [
        dict(save="{own}", load="{own}", save_interval=1),
        dict(save="{own}", ref_load="{own}", ref_ckpt_step=1, save_interval=1),
        dict(save="{tmp}/new", ref_load="{own}", ref_ckpt_step=1, save_interval=1, keep_checkpoints=2),
        dict(save="{tmp}/new", ref_load="{model}", save_interval=1),
        dict(save_hf="{tmp}/{{rollout_id}}", save_interval=1),
        dict(save="{tmp}/7", save_hf="{tmp}/7/hf_{{rollout_id:05d}}", save_interval=1),
        dict(metrics_file="{tmp}/metrics.jsonl"),
        dict(metrics_file="{model}/metrics.jsonl"),
        dict(dump_details="{tmp}/dump"),
    ],
)
def test_other_places_are_accepted(words, places, changes):
    validated_args(words(**filled(changes, places)))


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{rollout_id:99999999999d}", "'rollout_id:99999999999d'"),
        ("{rollout_id:500d}", "'rollout_id:500d'"),
        ("{rollout_id:x}", "'rollout_id:x'"),
        ("{rollout_id!r}", "'rollout_id:r'"),
        ("{rollout_id.real}", "'rollout_id.real'"),
        ("{}", "''"),
        ("{0}", "'0'"),
        ("{rollout_id:{step}}", "'rollout_id:{step}'"),
        ("{", "expected '}' before end of string"),
    ],
)
def test_a_placeholder_is_a_number_of_a_sensible_width(words, refusal, tmp_path, template, shown):
    for name in ("save_hf", "save_debug_rollout_data", "save_debug_train_data", "load_debug_rollout_data"):
        path = f"{tmp_path}/{template}.pt"
        message = refusal(words(**{name: path}))
        said = f"cannot fill in {shown} (wanted: no braces but {{rollout_id}})"
        assert message == f"--{name.replace('_', '-')} {path}: {said}"


@pytest.fixture
def taken_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_in_use_is_found_before_anything_starts(words, refusal, taken_port, monkeypatch):
    message = f"--sglang-router-port {taken_port}: in use (wanted: another port, or leave it out)"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = words(sglang_router_port=taken_port)
    assert refusal(line) == message
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # there the router runs on another machine, perhaps
    validated_args(line)


def test_the_port_of_the_routers_metrics_is_looked_at_too(words, refusal, taken_port, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    message = f"--router-prometheus-port {taken_port}: in use (wanted: another port, or leave it out)"
    assert refusal(words(router_prometheus_port=taken_port)) == message
    message = "--router-prometheus-port 70000: is not a port (wanted: another port, or leave it out)"
    assert refusal(words(router_prometheus_port=70000)) == message


def test_another_router_on_the_port_that_its_metrics_have_by_default_is_no_obstacle(words, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as server:
        with contextlib.suppress(OSError):  # it is in use already
            server.bind(("127.0.0.1", 29000))
            server.listen()
        validated_args(words())


def test_a_port_is_looked_at_only_where_it_is_used(words, taken_port, places):
    dump = f"{places['tmp']}/dump_{{rollout_id}}.pt"
    validated_args(words(sglang_router_port=taken_port, load_debug_rollout_data=dump))
