"""What the adapters for the original's names do, beside being there."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.stateless_adam import StatelessAdam
from slime.observability.rollout_data_utils import (
    load_debug_rollout_data,
    save_debug_rollout_data,
    tensorize_rollout_data_for_training,
    validate_rollout_routed_experts_for_replay,
)
from slime.observability.trace_utils import TRACE_CHILDREN_KEY, build_sglang_meta_trace_attrs, trace_span
from slime.observability.train_data_utils import restore_context_parallel_fields_to_cpu
from slime.observability.train_metric_utils import (
    gather_and_reduce_log_dict,
    reduce_train_step_metrics,
    rollout_log_metric_contribution,
)
from slime.ray.rollout_validation import validate_server_group_gpu_indices
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.utils import data, processing_utils
from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.eval_config import build_eval_dataset_configs
from slime.utils.misc import Box
from slime.utils.ppo_utils import chunked_discounted_returns, chunked_gae, vanilla_gae
from slime.utils.types import Sample
from tests.run_args import plugin_args

ROOT = Path(__file__).parents[2]
TRANSFORMERS = "\n".join(
    f"class {name}: ..."
    for name in ("AutoTokenizer", "AutoProcessor", "PreTrainedTokenizerBase", "ProcessorMixin")
)
THIN = (
    *("slime.rollout.base_types", "slime.rollout.data_source", "slime.rollout.sglang_rollout"),
    *("slime.rollout.fully_async_rollout", "slime.rollout.rm_hub", "slime.rollout.filter_hub.base_types"),
    *("slime.rollout.filter_hub.dynamic_sampling_filters", "slime.rollout.filter_hub.overlong"),
    *("slime.rollout.sample_hooks", "slime.utils.misc", "slime.utils.types", "slime.utils.data"),
)


def test_rollout_modules_load_where_ray_and_transformers_are_thin(tmp_path):
    for name, source in {"ray": "", "sglang_router": "", "transformers": TRANSFORMERS}.items():
        (tmp_path / f"{name}.py").write_text(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from importlib import import_module\n"
    code += f"for name in {THIN}: import_module(name)\nprint(sys.modules['transformers'].__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == str(tmp_path / "transformers.py"), done.stderr


MPU = """
class mpu:
    get_context_parallel_world_size, get_context_parallel_rank = (lambda: size), (lambda: 1)
size = 2
"""


def test_losses_load_where_megatron_core_has_nothing_but_mpu_and_ask_it_when_they_are_called(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for folder, source in ((core.parent, ""), (core, MPU)):
        (folder / "__init__.py").write_text(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "import megatron.core as core\nfrom slime.backends.megatron_utils import cp_utils, loss\n"
    code += "ask = lambda: cp_utils.get_logits_and_tokens_offset_with_cp(12, 7)[0]\nfirst = ask()\n"
    code += "core.size = 3\nprint(core.__file__, loss.mpu is cp_utils.mpu is core.mpu, first, ask())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == [str(core / "__init__.py"), "True", "3", "2"], done.stderr


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("length", [1, 7, 300])
def test_chunked_forms_are_the_loop(discount, length):
    generator = torch.Generator().manual_seed(length)
    rewards, values = torch.randn(2, 3, length, generator=generator)
    for mine, other in zip(
        chunked_gae(rewards, values, discount, 0.9), vanilla_gae(rewards, values, discount, 0.9), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    loop, running = torch.empty_like(rewards), torch.zeros(3)
    for t in reversed(range(length)):
        loop[:, t] = running = rewards[:, t] + discount * running
    torch.testing.assert_close(chunked_discounted_returns(rewards, discount), loop, atol=1e-5, rtol=1e-5)


def test_a_rank_gets_its_shard_with_the_lengths_of_its_own_samples(monkeypatch):
    shards = [{"partition": [2, 0], "total_lengths": [5, 6, 7], "raw_reward": [0.1, 0.2, 0.3]}, {}]
    fetched = []
    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(get=lambda ref: fetched.append(ref) or shards[ref])
    )
    found = data.process_rollout_data(plugin_args(), [Box(0), Box(1)], 0, 2)
    assert (found["total_lengths"], found["local_raw_reward"], fetched) == ([7, 5], [0.3, 0.1], [0])
    assert shards[0]["total_lengths"] == [5, 6, 7]
    with pytest.raises(ValueError, match="2 shards, wanted one for each of 3"):
        data.process_rollout_data(plugin_args(), [Box(0), Box(1)], 0, 3)


def test_a_processor_counts_what_a_prompt_shows(monkeypatch):
    asked = []

    def shown(prompt, processor):
        asked.append(prompt)
        return {"images": [prompt]}

    monkeypatch.setattr(processing_utils, "process_vision_info", shown)
    processor = lambda text, images: {"input_ids": [list(text) + 3 * images]}
    samples = [Sample(prompt="ab"), Sample(prompt="abcd"), Sample(prompt=[{"role": "user"}])]
    kept = data.filter_long_prompt(samples, None, processor, max_length=5)
    assert kept == [samples[0], samples[2]] and asked == ["ab", "abcd"]


async def test_hooks_get_the_keywords_that_they_take(monkeypatch):
    seen = []

    def hook(args, sample, *, rollout_id, mine=None):
        seen.append((sample.index, rollout_id, mine))

    monkeypatch.setattr("slime.rollout.sample_hooks.load_function", lambda path: hook)
    args = plugin_args(rollout_sample_hook_path=["some.hook"])
    set_current_rollout_id(4)
    made = await apply_rollout_sample_hooks(args, [[Sample(index=0)], Sample(index=1)], mine=2, other=3)
    assert [made[0][0].index, made[1].index] == [0, 1] and seen == [(0, 4, 2), (1, 4, 2)]
    monkeypatch.setattr("slime.rollout.sample_hooks.load_function", lambda path: lambda args, sample: "text")
    with pytest.raises(TypeError, match="returned str, expected a Sample or None"):
        await apply_rollout_sample_hooks(args, Sample(index=0))


def test_recordings_of_rollouts_and_evaluations_are_found_by_their_template(tmp_path):
    template = f"{tmp_path}/{{rollout_id}}.pt"
    samples = [Sample(index=i) for i in range(6)]
    save_debug_rollout_data(template, samples, rollout_id=2, evaluation=False)
    save_debug_rollout_data(template, {"held_out": {"samples": samples[:1]}}, rollout_id=2, evaluation=True)
    save_debug_rollout_data(None, samples, rollout_id=3, evaluation=False)
    assert {file.name for file in tmp_path.iterdir()} == {"2.pt", "eval_2.pt"}
    found = load_debug_rollout_data(template, rollout_id=2, subsample_ratio=0.5)
    assert [sample.index for sample in found] == [0, 1, 5]


def test_lists_become_tensors_of_the_types_that_a_trainer_reads():
    batch = {
        "tokens": [[1, 2]],
        "loss_masks": [[1]],
        "rollout_log_probs": [[-0.5]],
        "rollout_mask_sums": [1.0],
    }
    tensorize_rollout_data_for_training(batch)
    assert batch["tokens"][0].dtype == torch.long and batch["loss_masks"][0].dtype == torch.int
    assert batch["rollout_log_probs"][0].dtype == batch["rollout_mask_sums"].dtype == torch.float32
    assert batch.keys() == {"tokens", "loss_masks", "rollout_log_probs", "rollout_mask_sums"}


def test_routes_of_another_model_are_refused():
    args = plugin_args(num_layers=2, moe_router_topk=3)
    validate_rollout_routed_experts_for_replay([torch.zeros(4, 2, 3, dtype=torch.int32)], args)
    with pytest.raises(ValueError, match=r"sample 1: torch.int32 \[4, 2, 1\] .* 2 layers, top 3"):
        routes = [torch.zeros(4, 2, size, dtype=torch.int32) for size in (3, 1)]
        validate_rollout_routed_experts_for_replay(routes, args)


def test_phases_of_an_engine_are_below_the_span_that_asked():
    meta = {
        "pd_prefill_time": 0.5,
        "pd_decode_time": 1.5,
        "completion_tokens": 3,
        "finish_reason": {"type": "stop"},
    }
    attrs = build_sglang_meta_trace_attrs(meta)
    assert attrs["completion_tokens"] == 3 and attrs["finish_reason"] == "stop"
    assert attrs[TRACE_CHILDREN_KEY]["sglang_pd_prefill"] == {"pd_prefill_time": 0.5}
    sample = Sample(index=1)
    with trace_span(sample, "outer"), trace_span(sample, "generate", attrs={"a": 1}) as span:
        span.update(attrs)
    events = {(event["name"], event["type"]): event for event in sample.trace["events"]}
    inner = events["generate", "span_start"]["span_id"]
    assert events["sglang_pd_decode", "event"]["parent_span_id"] == inner
    assert TRACE_CHILDREN_KEY not in events["generate", "span_end"]["attrs"]


def test_a_step_s_tokens_count_once_though_ranks_of_a_sequence_count_them_all():
    results = [{"keys": ["loss"], "values": torch.tensor([8.0, 6.0])}]
    call = dict(step_global_batch_size=4, dp_with_cp_group=None)
    assert reduce_train_step_metrics(results, calculate_per_token_loss=True, cp_size=2, **call) == {
        "loss": 1.5
    }
    assert reduce_train_step_metrics(results, calculate_per_token_loss=False, cp_size=2, **call) == {
        "loss": 1.5
    }


def test_contributions_of_all_ranks_give_the_mean_over_rollouts():
    """Means per rollout 1, 2, 3 and 6; rank 0 has the first two, and each of two CP ranks half of a value."""
    parts = [(1 + 2) / 2, (1 + 2) / 2, (3 + 6) / 2, (3 + 6) / 2]
    pairs = [
        rollout_log_metric_contribution(x, cp_size=2, num_rollouts_in_rollout=4, dp_size=2) for x in parts
    ]
    assert sum(total for total, _ in pairs) / sum(count for _, count in pairs) == 3.0
    one = gather_and_reduce_log_dict({"a": (6.0, 4), "b": 2}, dp_size=1, dp_src_rank=0, dp_group=None)
    assert one == {"a": 1.5, "b": 2.0}


def test_split_values_are_gathered_by_all_and_kept_by_one():
    calls = []

    def gather(values, total, response):
        calls.append((total, response))
        return values * 2

    shard = {"total_lengths": [5, 4], "response_lengths": [2, 1], "log_probs": [torch.ones(2), torch.ones(1)]}
    kept = restore_context_parallel_fields_to_cpu(shard, gather, keep_restored=True)
    assert [values.tolist() for values in kept["log_probs"]] == [[2.0, 2.0], [2.0]]
    assert restore_context_parallel_fields_to_cpu(shard, gather, keep_restored=False) == {}
    assert calls == [(5, 2), (4, 1)] * 2


def test_engines_beyond_the_last_gpu_are_refused():
    call = dict(
        worker_type="decode", num_gpus_per_engine=2, num_gpus_per_engine_on_node=2, num_available_gpus=8
    )
    flags = dict(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)
    validate_server_group_gpu_indices(gpu_offset=4, num_engines=2, **call, **flags)
    with pytest.raises(ValueError, match=r"decode engines: 2 x 2 GPUs from 6 on .* but 8 are there"):
        validate_server_group_gpu_indices(gpu_offset=6, num_engines=2, **call, **flags)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_an_optimizer_without_moments_takes_adam_s_first_step(bias_correction, adam_w_mode):
    start, gradient = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, -1.0, 1e-4])
    lr, (beta1, beta2), eps, decay = 0.1, (0.8, 0.95), 1e-3, 0.01
    param = torch.nn.Parameter(start.clone())
    optimizer = StatelessAdam(
        *([param],),
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=decay,
        bias_correction=bias_correction,
        adam_w_mode=adam_w_mode,
    )
    for _ in range(2):
        param.grad = gradient.clone()
        optimizer.step()
    a, b = (1.0, 1.0) if bias_correction else (1 - beta1, (1 - beta2) ** 0.5)
    wanted = start.double()
    for _ in range(2):
        g = gradient.double() if adam_w_mode else gradient.double() + decay * wanted
        wanted = wanted * (1 - lr * decay) if adam_w_mode else wanted
        wanted = wanted - lr * a * g / (b * g.abs() + eps)
    torch.testing.assert_close(param.detach().double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_schedule_needs_no_more_of_args_than_sizes():
    args = plugin_args(
        use_dynamic_batch_size=True, max_tokens_per_gpu=64, micro_batch_size=1, balance_data=True,
        balance_by_flops=True, hidden_size=8, num_attention_heads=2, num_query_groups=2, vocab_size=16,
        ffn_hidden_size=16, num_experts=None, num_layers=1, kv_channels=None,
    )  # fmt: skip
    layout = dict(dp_size=2, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)
    lengths = [40, 10, 30, 20]
    schedule = build_dp_schedule(args, layout, lengths, global_batch_size=4, rollout_indices=[0, 1, 2, 3])
    assert sorted(place for part in schedule[0] for place in part) == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="num_rollouts"):
        build_dp_schedule(args, layout, lengths, global_batch_size=8, rollout_indices=[0, 1, 2, 3])


def test_data_sets_of_an_evaluation_need_no_flags():
    args = plugin_args(rollout_temperature=0.7)
    entry = dict(name="aime", path="x.jsonl", rm_type="math", stop=["a"], eval_task_timeout=3)
    (found,) = build_eval_dataset_configs(args, [entry], defaults={"repetition_penalty": 1.1})
    assert (found.temperature, found.repetition_penalty, found.stop, found.top_p) == (0.7, 1.1, ["a"], None)
