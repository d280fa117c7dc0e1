"""Engines that serve a quantised checkpoint get exactly its tensors, and then compute with those."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slime.backends.sglang_utils.client import EngineClient
from slime.config.run import run_config
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.utils.tensor_bucket import FlattenedTensorBucket, serialize_tensors
from slime.utils.types import EngineEndpoint
from slime.weight_sync.filters.format import ServedFormat
from slime.weight_sync.update import WeightUpdate
from tests.engines.embedded import Server, token_logprobs
from tests.families import kept_tensors, tiny_family
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.weight_sync.test_handle import Recorder
from tools.convert_hf_to_fp8 import main as to_fp8
from tools.convert_hf_to_int4 import main as to_int4
from tools.convert_hf_to_mxfp4 import main as to_mxfp4
from tools.convert_hf_to_mxfp8 import main as to_mxfp8

pytestmark = pytest.mark.slow

KINDS = {
    # Sizes that are no multiple of a block, and scales that are powers of two.
    "fp8": (to_fp8, ["--block-size", "40", "24", "--scale-fmt", "ue8m0"]),
    "int4": (to_int4, ["--group-size", "16"]),
    "mxfp8": (to_mxfp8, []),
}
TRAINER, ENGINE = 1, 0
"""Seeds: engines start with other weights than the trainer holds."""
A_MATRIX = "model.layers.0.mlp.experts.1.down_proj.weight"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """By (kind, seed): checkpoints of a mixture of experts, "plain" and quantised."""
    root = tmp_path_factory.mktemp("hf")
    found = {}
    for seed in (ENGINE, TRAINER):
        plain = found["plain", seed] = save_tiny_hf(
            root / f"plain-{seed}", "qwen3_moe", seed, moe_intermediate_size=64
        )
        for kind, (convert, flags) in KINDS.items():
            path = found[kind, seed] = str(root / f"{kind}-{seed}")
            assert convert(["--model-dir", plain, "--save-dir", path, *flags]) == 0
    return found


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def server(kind, directories):
    server = Server(directories[kind, ENGINE], "--skip-tokenizer-init", "--dtype", "float32")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture
def engine(server, kind, directories):
    """A client of an engine that serves the ENGINE weights."""
    client = EngineClient(EngineEndpoint(server.url, None, 1, None))
    client.update_weights_from_disk(directories[kind, ENGINE], weight_version="old", flush_cache=True)
    return client


def _sync(rank, args, source, served, endpoints):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, source)
    update = WeightUpdate(run_config(args), HfWeights(args, model), served=served)
    update.connect(endpoints)
    try:
        return update.run(3).sent
    finally:
        update.disconnect()


def _endpoint(url, colocated):
    return EngineEndpoint(url, None, 1, 0 if colocated else None)


def _args(directories, **overrides):
    experts = {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
    return make_args(directories["plain", TRAINER], **experts, **overrides)


def _checksum(client):
    return client.weights_checker("checksum")["per_engine_checksum"]


@pytest.fixture
def recorder():
    """An engine that keeps what it gets."""
    engine = Recorder()
    engine.start()
    yield engine
    engine.stop()


def _sync_with(recorder, directories, kind):
    args = _args(directories, colocate=True, update_weight_buffer_size=30_000)
    source, served = directories["plain", TRAINER], directories[kind, TRAINER]
    run_ranks(_sync, 1, args, source, served, [_endpoint(recorder.url, True)])


def test_an_engine_gets_the_names_formats_and_values_of_its_checkpoint(recorder, directories, kind):
    _sync_with(recorder, directories, kind)
    wanted = load_file(f"{directories[kind, TRAINER]}/model.safetensors")
    assert recorder.weights[0].keys() == wanted.keys()
    for name, tensor in recorder.weights[0].items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name


def test_wide_formats_come_first_so_that_all_are_aligned_in_a_flat_bucket(directories, kind):
    plain = load_file(f"{directories['plain', TRAINER]}/model.safetensors")
    bucket = ServedFormat(directories[kind, ENGINE]).encode([*plain.items()])
    widths = [tensor.dtype.itemsize for _, tensor in bucket]
    assert len({*widths}) > 1
    assert widths == sorted(widths, reverse=True)


def test_some_weights_need_a_server_that_lays_them_out_anew(recorder, directories, kind):
    del recorder.answers["begin_weight_update"]
    if kind in ("int4", "mxfp8"):
        with pytest.raises(RuntimeError, match="has no /begin_weight_update"):
            _sync_with(recorder, directories, kind)
        assert not recorder.weights
    else:
        _sync_with(recorder, directories, kind)
        assert recorder.weights


def test_an_engine_serves_the_quantised_weights_after_a_sync(engine, directories, kind, tmp_path):
    """By handle and by broadcast, from two ranks; its log-probs are those of ``transformers``."""
    before = _checksum(engine)
    engine.update_weights_from_disk(directories[kind, TRAINER], flush_cache=True)
    wanted = _checksum(engine)
    engine.update_weights_from_disk(directories[kind, ENGINE], weight_version="old", flush_cache=True)
    assert _checksum(engine) == before != wanted
    colocated = kind == "fp8"
    layout = {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    layout |= {"expert_tensor_parallel_size": 1, "update_weight_buffer_size": 30_000}
    source, served = directories["plain", TRAINER], directories[kind, TRAINER]
    args = _args(directories, colocate=colocated, **layout)
    sent = run_ranks(_sync, 2, args, source, served, [_endpoint(engine.endpoint.url, colocated)])
    assert _checksum(engine) == wanted
    assert engine.weight_version() == "3"
    stored = load_file(f"{directories[kind, TRAINER]}/model.safetensors")
    assert sent == [sum(tensor.nbytes for tensor in stored.values()), 0]
    ids, found = _sampled(engine)
    exact = token_logprobs(_dequantised(directories[kind, TRAINER], tmp_path / "exact"), ids)[3:]
    plain = token_logprobs(transformers.AutoModelForCausalLM.from_pretrained(source), ids)[3:]
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) > 1e-3


def test_a_version_on_a_disk_is_in_the_format_of_the_checkpoint(engine, directories, kind, tmp_path):
    engine.update_weights_from_disk(directories[kind, TRAINER], flush_cache=True)
    wanted = _checksum(engine)
    engine.update_weights_from_disk(directories[kind, ENGINE], weight_version="old", flush_cache=True)
    source, served = directories["plain", TRAINER], directories[kind, TRAINER]
    disk = {"update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path)}
    disk |= {"update_weight_disk_keep_files": False, "synced_checkpoint": str(served)}
    args = _args(directories, check_weight_checksums=True, update_weight_buffer_size=30_000, **disk)
    run_ranks(_sync, 1, args, source, served, [_endpoint(engine.endpoint.url, False)])
    assert (_checksum(engine), engine.weight_version()) == (wanted, "3")


def _sampled(engine):
    """Prompt and answer, and the log-probs of the latter."""
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True}
    answer = engine.request("POST", "/generate", body)
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return [5, 6, 7, 8, *answer["output_ids"]], found


def _dequantised(path, target):
    target.mkdir()
    with WeightsReader(path) as reader:
        save_file(dict(reader.items()), target / "model.safetensors", {"format": "pt"})
        config = json.loads((reader.path / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


def test_unchanged_weights_come_back_bit_for_bit(engine, directories, kind):
    path = directories[kind, ENGINE]
    args = _args(directories, check_weight_update_equal=True)
    engine.weights_checker("snapshot")
    run_ranks(_sync, 1, args, path, path, [_endpoint(engine.endpoint.url, False)])


def test_weights_that_the_checkpoint_has_not_are_named(engine, directories, kind, tmp_path):
    other = save_tiny_hf(tmp_path, "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=64)
    endpoints = [_endpoint(engine.endpoint.url, False)]
    with pytest.raises(RuntimeError, match=r"has no weight 'model.layers.2\."):
        source = directories["plain", TRAINER]
        run_ranks(_sync, 1, _args(directories), source, _quantised(other, kind, tmp_path / "few"), endpoints)
    assert engine.serves()  # the manifest tells, before it is stopped


def _quantised(source, kind, target):
    convert, flags = KINDS[kind]
    assert convert(["--model-dir", source, "--save-dir", str(target), *flags]) == 0
    return str(target)


@pytest.mark.parametrize("fault", ["plain", "alone", "format", "size"])
def test_the_engine_refuses_what_does_not_fit_its_checkpoint(server, engine, directories, kind, fault):
    stored = load_file(f"{directories[kind, TRAINER]}/model.safetensors")
    parts = {name: tensor for name, tensor in stored.items() if name.startswith(A_MATRIX)}
    scale = next(name for name in parts if "_scale" in name)
    if fault == "plain":
        parts, said = {A_MATRIX: torch.zeros(64, 64)}, f"weight '{A_MATRIX}'"
    elif fault == "alone":
        del parts[scale]
        said = f"weight '{A_MATRIX}': comes without {scale}"
    else:
        changed = parts[scale].half() if fault == "format" else parts[scale][1:]
        parts[scale], said = changed, f"weight '{scale}': {str(changed.dtype).removeprefix('torch.')} "
    before = _checksum(engine)
    engine.begin_weight_update()
    bucket = FlattenedTensorBucket([*parts.items()])
    payload = {"flattened_tensor": bucket.flattened_tensor, "metadata": bucket.metadata}
    response = server.post(
        "/update_weights_from_tensor",
        serialized_named_tensors=[serialize_tensors(payload, share=False)],
        load_format="flattened_bucket",
    )
    engine.end_weight_update()
    assert response.status_code == 400
    assert said in response.text
    assert _checksum(engine) == before


def test_experts_that_the_trainer_has_in_one_tensor_are_sent_one_by_one(recorder, tmp_path):
    """Published checkpoints of Qwen3.5 have them in one tensor, those in float8 one by one."""
    made = {}
    for seed in (ENGINE, TRAINER):
        plain, path = tmp_path / f"plain-{seed}", tmp_path / f"fp8-{seed}"
        tiny_family("qwen3_5_moe", plain, seed, num_hidden_layers=2)
        assert to_fp8(["--model-dir", str(plain), "--save-dir", str(path), "--block-size", "32", "24"]) == 0
        made[seed] = path
    experts = {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
    parallel = {"expert_model_parallel_size": 2, "update_weight_buffer_size": 30_000}
    source, served = str(tmp_path / f"plain-{TRAINER}"), str(made[TRAINER])
    args = make_args(source, **experts, **parallel, colocate=True)
    run_ranks(_sync, 2, args, source, served, [_endpoint(recorder.url, True)])
    kept = kept_tensors("qwen3_5_moe", made[TRAINER])
    wanted = {k: t for k, t in load_file(made[TRAINER] / "model.safetensors").items() if k not in kept}
    assert any(".experts.3.up_proj.weight_scale_inv" in name for name in wanted)
    assert recorder.weights[0].keys() == wanted.keys()
    for name, tensor in recorder.weights[0].items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    server = Server(str(made[ENGINE]), "--skip-tokenizer-init", "--dtype", "float32")
    try:
        client = EngineClient(EngineEndpoint(server.wait_ready().url, None, 1, None))
        args = make_args(source, **experts, update_weight_buffer_size=30_000)
        run_ranks(_sync, 1, args, source, served, [_endpoint(server.url, False)])
        sent = _checksum(client)
        client.update_weights_from_disk(str(made[TRAINER]), flush_cache=True)
        assert sent == _checksum(client)
    finally:
        server.stop()


def test_experts_in_mxfp4_are_sent_as_the_checkpoint_has_them(recorder, tmp_path):
    made = {}
    for seed in (ENGINE, TRAINER):
        plain, made[seed] = tmp_path / f"plain-{seed}", tmp_path / f"mxfp4-{seed}"
        tiny_family("gpt_oss", plain, seed, num_hidden_layers=2)
        assert to_mxfp4(["--model-dir", str(plain), "--save-dir", str(made[seed])]) == 0
    source = str(tmp_path / f"plain-{TRAINER}")
    experts = {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
    args = make_args(source, **experts, update_weight_buffer_size=30_000, colocate=True)
    run_ranks(_sync, 1, args, source, str(made[ENGINE]), [_endpoint(recorder.url, True)])
    wanted = load_file(made[TRAINER] / "model.safetensors")
    assert any(name.endswith("down_proj_scales") for name in wanted)
    assert recorder.weights[0].keys() == wanted.keys()
    for name, tensor in recorder.weights[0].items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
