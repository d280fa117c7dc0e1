"""The page of ``--check``, what it counts, and what it finds too large."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from slime.arguments import UsageError, parse_args, validated_args
from slime.check import page, report
from slime.check.activations import activations
from slime.check.layout import layout_of
from slime.check.parameters import whole_model
from slime.config.run import run_config
from slime.ray.session import main
from slime.rollout.data_source import RolloutDataSource
from tests.check.test_scripts import CHAT, write_rows
from tests.models.public_configs import CONFIGS

ROOT = Path(__file__).parents[2]
# As the headers of their files sum up to.
TOTALS = {
    **{"qwen2.5-0.5B": 494_032_768, "qwen3-4B": 4_022_468_096, "qwen3-8B": 8_190_735_360},
    **{"qwen3-32B": 32_762_123_264, "qwen3-30B-A3B": 30_532_122_624, "qwen3-235B-A22B": 235_093_634_560},
    **{"llama3.2-3B-Instruct": 3_212_749_824, "mixtral-8x7B": 46_702_792_704, "gemma3-270M": 268_098_176},
    **{"qwen1.5-MoE-A2.7B": 14_315_784_192, "qwen3-next-80B-A3B": 79_674_391_296},
    **{"glm4-9B": 9_400_279_040, "gpt-oss-20b": 20_914_757_184, "deepseek-v2-lite": 15_706_484_224},
}
# In billions, as their model cards count the main model: the files have MTP layers and scales too.
ROUNDED = {"deepseek-v3": 671.0, "moonlight": 15.96, "minimax-m2": 228.7, "kimi-k2": 1026}


@pytest.fixture
def words(tmp_path):
    """``words(model, "--flag", ...)``: the command line of a GRPO run of a published model."""
    data = tmp_path / "data.jsonl"
    write_rows(data, {"input": "1+1", "label": "2"})

    def build(model, *flags):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
        return [
            *("--hf-checkpoint", str(tmp_path), "--prompt-data", str(data), "--label-key", "label"),
            *("--rm-type", "math", "--num-rollout", "2", "--rollout-batch-size", "32", "--colocate"),
            *("--rollout-max-context-len", "8192", "--num-steps-per-rollout", "1", "--check"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192", "--disable-rewards-normalization"),
            *flags,
        ]

    return build


@pytest.fixture
def checked(words):
    """The configuration of such a command line."""
    return lambda model, *flags: run_config(validated_args(words(model, *flags)))


@pytest.mark.parametrize("model", TOTALS)
def test_published_models_have_the_parameters_that_they_are_known_for(model, checked):
    assert sum(whole_model(checked(model)).values()) == TOTALS[model]


@pytest.mark.parametrize("model", ROUNDED)
def test_published_models_have_the_parameters_that_their_cards_round(model, checked):
    billions = sum(whole_model(checked(model)).values()) / 1e9
    assert billions == pytest.approx(ROUNDED[model], rel=0.001)


def test_stages_have_the_layers_in_the_order_of_the_pipeline(checked):
    config = checked(
        "qwen3-4B", "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "9"
    )
    assert layout_of(config).stages == ((range(9), range(18, 27)), (range(9, 18), range(27, 36)))
    uneven = checked(
        "qwen3-4B", "--pipeline-model-parallel-size", "4", "--decoder-first-pipeline-num-layers", "6"
    )
    assert [stage[0] for stage in layout_of(uneven).stages] == [
        *(range(6), range(6, 16)),
        *(range(16, 26), range(26, 36)),
    ]
    assert layout_of(uneven).ranks(3) == range(6, 8)


def test_earlier_stages_keep_more_micro_batches(checked):
    config = checked("qwen3-4B", "--pipeline-model-parallel-size", "4")
    layout = layout_of(config)
    kept = [activations(config, layout, stage, 1024).kept for stage in range(4)]
    assert kept[0] == pytest.approx(4 * kept[2] / 2)
    assert kept[1] == pytest.approx(3 * kept[2] / 2)


def test_one_micro_batch_is_all_that_can_wait(checked):
    pipeline = ("--pipeline-model-parallel-size", "8", "--n-samples-per-prompt", "1", "--num-layers", "32")
    config = checked("mixtral-8x7B", *pipeline)
    config.flat.use_dynamic_batch_size, config.flat.micro_batch_size = False, 32
    config = run_config(config.flat)
    layout = layout_of(config)
    assert activations(config, layout, 0, 1024).kept == activations(config, layout, 6, 1024).kept


def test_the_page_tells_parameters_layout_batches_and_memory(checked):
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--num-steps-per-rollout", "2")
    text = page(report(checked("qwen3-4B", *layout, "--check-gpu-memory-gb", "80")))
    assert "4.02 B in all (embedding 388.96 M, dense 3.63 B)" in text
    assert "8 ranks: TP 2 x PP 1 x CP 1 x DP 4" in text
    assert "ranks 0-7: embedding, layers 0-35, head; each 2.01 B" in text
    assert "engines of default: 8 on 8 GPUs shared with the trainer" in text
    assert "optimizer steps: 2 of 16 samples, 4 of each data-parallel rank" in text
    assert "up to 8192 tokens on a GPU" in text
    assert "Will not fit" not in text


@pytest.mark.parametrize(
    ("flags", "gpu", "told"),
    [((), None, True), ((), 40 * 2**30, False), (("--check-gpu-memory-gb", "80"), None, False)],
)
def test_a_size_of_gpus_that_nobody_named_is_said_to_be_assumed(flags, gpu, told, checked, monkeypatch):
    monkeypatch.setattr(import_module("slime.check.report"), "gpu_memory", lambda: gpu)
    text = page(report(checked("qwen3-4B", *flags)))
    assert ("their memory: 80.0 GiB each, an assumption" in text) == told
    assert f"in GiB of {40 if gpu else 80}.0" in text


def test_what_does_not_fit_is_told_with_the_size_that_would_do(checked):
    (line, *_) = report(checked("qwen3-32B", "--check-gpu-memory-gb", "80")).misfits
    assert line.startswith("actor: ranks 0 to 7 need ") and "(found: a GPU of 80 GiB; wanted: " in line
    small = report(
        checked("qwen3-32B", "--check-gpu-memory-gb", "40", "--rollout-num-gpus-per-engine", "1")
    ).misfits
    assert any(line.startswith("engines of 1 GPUs: the weights take 61.0 GiB") for line in small)
    stays = report(checked("qwen3-4B", "--no-offload-train", "--tensor-model-parallel-size", "8")).misfits
    assert any("as the trainer stays" in line for line in stays)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--optimizer-cpu-offload"], "optimizer"),
        (["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"], "optimizer"),
        (["--grad-reduce-in-bf16"], "gradients"),
        (["--tensor-model-parallel-size", "2"], "weights"),
    ],
)
def test_flags_that_spare_memory_are_honoured(flags, part, checked):
    states = [report(checked("qwen3-4B", *more)).roles[0].stages[0].states for more in ([], flags)]
    assert getattr(states[1], part) < getattr(states[0], part)


def test_a_critic_has_a_page_of_its_own(checked):
    ppo = ("--advantage-estimator", "ppo", "--n-samples-per-prompt", "1", "--critic-num-gpus-per-node", "8")
    actor, critic = report(checked("qwen3-4B", *ppo)).roles
    assert critic.role == "critic" and critic.stages[0].activations.logits == 0
    assert sum(actor.whole.values()) - sum(critic.whole.values()) == -(2560 + 1)


def test_fsdp_shards_everything(checked):
    (role,) = report(checked("qwen3-4B", "--train-backend", "fsdp")).roles
    total = sum(role.whole.values())
    assert role.stages[0].states.weights == pytest.approx(4 * total / 8)


def test_fsdp_counts_models_without_a_family(tmp_path, words):
    from transformers import Olmo2Config, Olmo2ForCausalLM

    ppo = ("--advantage-estimator", "ppo", "--n-samples-per-prompt", "1", "--optimizer", "sgd")
    line = words("qwen3-4B", "--train-backend", "fsdp", *ppo)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = Olmo2Config(**sizes, num_attention_heads=4, max_position_embeddings=8192, pad_token_id=None)
    config.save_pretrained(tmp_path)
    actor, critic = report(run_config(validated_args(line))).roles
    assert sum(actor.whole.values()) == sum(p.numel() for p in Olmo2ForCausalLM(config).parameters())
    assert actor.whole["embedding"] == 64 * 32
    assert actor.stages[0].activations is None
    # The head of a critic has 32 weights and a bias in the place of a vocabulary.
    assert sum(critic.whole.values()) == sum(actor.whole.values()) - 64 * 32 + 33
    # SGD keeps one momentum of each weight.
    assert actor.stages[0].states.optimizer == actor.stages[0].states.weights
    # All are whole numbers of elements over the ranks, rounded up.
    lora = ("--lora-rank", "3", "--lora-target-modules", "q_proj", "down_proj", "lm_head")
    adapted, critic = report(run_config(validated_args([*line, *lora]))).roles
    states, of_adapters = adapted.stages[0].states, 2 * 3 * (32 + 32 + 48 + 32)
    assert states.gradients == states.optimizer == 4 * -(-of_adapters // adapted.layout.world)
    whole = sum(actor.whole.values()) + of_adapters
    assert states.weights == 4 * -(-whole // adapted.layout.world)
    assert critic.stages[0].states.gradients == critic.stages[0].states.weights


def test_fsdp_counts_adapters_of_a_family_as_the_other_trainer(checked):
    megatron, fsdp, plain = (
        report(checked("qwen3-4B", *more)).roles[0].stages[0].states
        for more in (("--lora-rank", "8"), ("--lora-rank", "8", "--train-backend", "fsdp"), ())
    )
    assert plain.trained > 50 * megatron.trained > 0
    assert fsdp.gradients == pytest.approx(4 * megatron.trained / 8, abs=4)
    assert fsdp.optimizer == pytest.approx(8 * megatron.trained / 8, abs=8)
    assert fsdp.weights > 4 * plain.trained / 8


def test_options_of_sglang_that_nobody_here_knows_are_told(tmp_path, checked, capsys):
    config = checked("qwen3-4B", "--sglang-mem-fraction-static", "0.5", "--sglang-chunked-thing", "a", "b")
    assert (config.flat.rollout_engine, config.flat.sglang_mem_fraction_static) == ("sglang", 0.5)
    assert config.flat.sglang_chunked_thing == ["a", "b"]
    (engine,) = report(config).engines
    assert engine.static == int(0.5 * report(config).gpu)
    (halved,) = report(checked("qwen3-4B", "--sglang-kv-cache-dtype", "fp8_e5m2")).engines
    assert halved.token == engine.token / 2
    with pytest.raises(UsageError, match="--slang-x: unknown flag"):
        checked("qwen3-4B", "--slang-x", "1")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--sglang-mem-fraction-static", "much"],
            "-static much: wanted a number above 0, below 1",
        ),
        (
            ["--sglang-mem-fraction-static", "NaN"],
            "-static nan: wanted a number above 0",
        ),
        (["--sglang-mem-fraction-static=1.5"], "--sglang-mem-fraction-static 1.5: wanted a number above 0"),
        (["--sglang-mem-fraction-static"], "--sglang-mem-fraction-static True: wanted a number above 0"),
        (["--sglang-pp-size", "0"], "--sglang-pp-size 0: wanted a number of stages"),
        (
            ["--sglang-pipeline-parallel-size", "x"],
            "-parallel-size x: wanted a number of stages",
        ),
    ],
)
def test_what_the_memory_of_engines_follows_from_is_looked_at(flags, said, checked):
    with pytest.raises(UsageError, match=said):
        checked("qwen3-4B", *flags)


def test_so_is_what_a_file_says_of_engines(tmp_path, checked):
    fleet = tmp_path / "fleet.yaml"
    groups = [{"worker_type": "regular", "num_gpus": 8, "overrides": {"mem_fraction_static": "much"}}]
    fleet.write_text(json.dumps({"sglang": [{"name": "default", "server_groups": groups}]}))
    said = "model default: group 1: overrides: mem_fraction_static is 'much' .wanted a number above 0"
    with pytest.raises(UsageError, match=said):
        checked("qwen3-4B", "--sglang-config", str(fleet))


def test_stages_of_an_engine_share_layers(checked):
    size = ("--rollout-num-gpus-per-engine", "8")
    (whole,) = report(checked("qwen3-4B", *size)).engines
    (staged,) = report(checked("qwen3-4B", *size, "--sglang-pipeline-parallel-size", "2")).engines
    # 8 heads of keys and values over 4 GPUs rather than 8, and half of the layers.
    assert staged.token == whole.token and staged.weights == whole.weights
    assert checked("qwen3-4B", *size, "--sglang-pp-size", "2").flat.sglang_tp_size == 4


def test_delta_nets_keep_no_tokens(checked):
    (engine,) = report(checked("qwen3-next-80B-A3B", "--rollout-num-gpus-per-engine", "8")).engines
    # 12 of 48 layers have attention: of keys and values one head of 256 features on each GPU.
    assert engine.token == 12 * 2 * 256 * 2


# Gigabytes of the files that are published.
QUANTISED = {
    "gpt-oss-20b": ({"quant_method": "mxfp4"}, 13.76),
    "gpt-oss-120b": ({"quant_method": "mxfp4"}, 65.25),
    "qwen3-30B-A3B": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 31.2),
    "kimi-k2-thinking": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
            },
        },
        594,
    ),
}


@pytest.mark.parametrize("model", QUANTISED)
def test_quantised_engines_need_what_published_files_have(model, checked, monkeypatch):
    described, size = QUANTISED[model]
    monkeypatch.setitem(CONFIGS, model, CONFIGS[model] | {"quantization_config": described})
    flags = ("--debug-rollout-only",) if described["quant_method"] == "mxfp4" else ()
    (engine,) = report(checked(model, "--rollout-num-gpus-per-engine", "8", *flags)).engines
    assert engine.weights * 8 / 1e9 == pytest.approx(size, rel=0.03)


def test_mxfp8_has_a_byte_more_for_each_32_numbers(checked, monkeypatch):
    described = {"fp8": {"weight_block_size": [128, 128]}, "mxfp8": {}}
    sizes = {}
    for method, more in described.items():
        config = CONFIGS["qwen3-30B-A3B"] | {"quantization_config": {"quant_method": method, **more}}
        monkeypatch.setitem(CONFIGS, method, config)
        sizes[method] = report(checked(method, "--rollout-num-gpus-per-engine", "8")).engines[0].weights
    plain = report(checked("qwen3-30B-A3B", "--rollout-num-gpus-per-engine", "8")).engines[0].weights
    assert sizes["mxfp8"] - sizes["fp8"] == pytest.approx((plain - sizes["fp8"]) / 32, rel=1e-6)


def test_data_that_is_missing_is_an_error_behind_the_page(tmp_path, words, capsys):
    line = words("qwen3-4B")
    (tmp_path / "data.jsonl").unlink()
    shown = []
    with pytest.raises(SystemExit) as error:
        parse_args(argv=line, show=shown.append)
    assert error.value.code == 2 and len(shown) == 1
    assert "--prompt-data" in capsys.readouterr().err


def test_weights_are_wanted_without_check(words):
    with pytest.raises(UsageError, match=r"holds no \.safetensors file"):
        validated_args([word for word in words("qwen3-4B") if word != "--check"])


def test_a_run_that_only_evaluates_needs_no_prompts(tmp_path, checked):
    exam = tmp_path / "exam.jsonl"
    write_rows(exam, {"input": CHAT, "label": "2"})
    evaluation = ("--eval-prompt-data", "exam", str(exam), "--eval-interval", "1", "--apply-chat-template")
    args = checked("qwen3-4B", "--num-rollout", "0", *evaluation).flat
    args.prompt_data = None
    from slime.arguments.groups.data import derive

    derive(args)
    assert RolloutDataSource(args).dataset is None


@pytest.mark.parametrize(("gpu", "status"), [("80", 0), ("1", 1)])
def test_the_exit_status_says_whether_it_would_start(gpu, status, words, monkeypatch, capsys):
    """Of train.py's own entry; no cluster is started."""
    from slime.ray import session

    line = words("qwen2.5-0.5B", "--max-tokens-per-gpu", "1024", "--check-gpu-memory-gb", gpu)
    monkeypatch.setattr(sys, "argv", ["train.py", *line])
    monkeypatch.setattr(session, "_run", lambda *_: pytest.fail("the run was started"))
    with pytest.raises(SystemExit) as ending:
        session.main(lambda *_: None)
    out, err = capsys.readouterr()
    assert ending.value.code == status
    assert "Memory of a GPU while the actor trains" in out
    assert ("error: " in err) == bool(status)


def test_the_page_needs_no_package_that_takes_long_to_import(words):
    code = f"""
import sys
from slime.arguments.core.parser import parse
from slime.arguments.registry import CONFIG_GROUPS
from slime.check import page, report
from slime.config.run import run_config
from slime.ray.session import main
args = parse({words("qwen3-4B")!r}, None)
for group in CONFIG_GROUPS:
    group.derive(args)
assert not [message for group in CONFIG_GROUPS for message in group.contradictions(args)]
page(report(run_config(args)))
print([name for name in ("ray", "sglang", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_policies_have_a_page_each_and_one_for_what_all_take(words, tmp_path, capsys):
    """As the command prints them."""
    policies = tmp_path / "policies.yaml"
    policies.write_text("policies:\n  - {name: big}\n  - {name: small, actor_num_gpus_per_node: 4}\n")
    line = [word for word in words("qwen3-4B", "--policies", str(policies)) if word != "--colocate"]
    line += ["--rollout-num-gpus", "8", "--check-gpu-memory-gb", "80"]
    with pytest.raises(SystemExit) as end:
        main(lambda *groups: None, argv=line)
    told = capsys.readouterr().out
    assert "Policy big: " in told and "Policy small: " in told
    *_, totals = told.partition("All 2 policies\n")
    host = sum(float(row.split()[-1]) for row in told.splitlines() if row.lstrip().startswith("actor 0-"))
    assert totals.splitlines()[:2] == [
        "  parameters that are trained: 8.04 B of 2 models",
        "  GPUs in all: 28 (12 of trainers, 16 of engines)",
    ]
    (memory,) = re.findall(r"  memory of hosts, of the ranks of all trainers: ([\d.]+) GiB", totals)
    assert float(memory) == pytest.approx(host, abs=0.02)
    assert end.value.code in (0, 1)


def test_one_model_has_no_totals(words, capsys):
    with pytest.raises(SystemExit):
        main(lambda *groups: None, argv=words("qwen3-4B", "--check-gpu-memory-gb", "80"))
    assert "policies" not in capsys.readouterr().out
