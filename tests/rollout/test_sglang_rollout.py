import asyncio
import re

import pytest
from fastapi.responses import JSONResponse

from slime.config.run import run_config
from slime.observability.rollout_metrics import compute_perf_metrics_from_samples
from slime.rollout import sglang_rollout
from slime.rollout.attempts import flatten, oldest_version, without_answers
from slime.rollout.base_types import RolloutError
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import prepare_request
from slime.rollout.sglang_rollout import generate_and_rm, generate_rollout_async, get_model_url
from slime.utils.types import EARLIER_TOKENS, Sample
from tests.engines.fake import NEVER
from tests.rollout import plugins

PLUGINS = "tests.rollout.plugins."


def question(conversation):
    return int(re.search(r"user\nq(\d+)<", conversation)[1])


class StopsAfter:
    """The answer to one question stops after some tokens, and the others wait until it has."""

    def __init__(self, number, tokens):
        self.number, self.tokens, self.count = number, tokens, 0

    def __call__(self, conversation):
        if question(conversation) != self.number:
            return lambda: self.count > self.tokens
        self.count += 1
        return NEVER if self.count > self.tokens else 0.0


def balanced(source):
    books = source.ledger
    return books.balanced and books.leased == 0 and books.buffered == source.get_buffer_length()


async def test_collects_the_groups_in_order_with_tokens_log_probs_and_rewards(engine, make_args, make_source):
    args = make_args()
    engine.answer = lambda conversation: f"a{question(conversation)}"
    engine.delay = lambda conversation: 0.03 - 0.01 * question(conversation)  # the last is done first
    source = make_source(args)

    output = await generate_rollout_async(args, 0, source)

    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3], [4, 5]]
    assert [group[0].label for group in output.samples] == ["a0", "a1", "a2"]
    sample = output.samples[1][0]
    assert sample.response == "a1<|im_end|>"
    assert sample.status == Sample.Status.COMPLETED
    assert sample.response_length == len(sample.rollout_log_probs) == len(sample.loss_mask) == 3
    assert sample.tokens[-3:] == engine.tokenizer("a1<|im_end|>", add_special_tokens=False)["input_ids"]
    assert sample.rollout_log_probs == [-0.25] * 3
    assert sample.reward == 3.0
    assert sample.weight_versions == ["1"]
    assert sample.prefix_cache_info.cached_tokens == 1
    assert source.ledger.trained == source.ledger.issued == 3
    assert balanced(source)


async def test_a_response_at_the_limit_is_truncated(engine, make_args, make_source):
    args = make_args(rollout_max_response_len=2)
    output = await generate_rollout_async(args, 0, make_source(args))
    assert {s.status for group in output.samples for s in group} == {Sample.Status.TRUNCATED}
    assert engine.seen("generate")[0]["sampling_params"]["max_new_tokens"] == 2


def test_what_training_replays_is_asked_for_in_training_alone(make_args):
    def wanted(evaluation=False, **flags):
        args, sample = make_args(**flags), Sample(index=0, prompt="q")
        body = prepare_request(run_config(args), sample, {"max_new_tokens": 4}, evaluation)
        return sorted(name for name, value in body.items() if value is True)

    replays = dict(replays_nucleus=True, use_rollout_routing_replay=True)
    assert wanted(**replays) == ["return_logprob", "return_routed_experts", "return_sampling_mask"]
    assert wanted(evaluation=True, **replays) == wanted() == ["return_logprob"]


async def test_concurrency_stays_below_the_limit(engine, make_args, make_source):
    args = make_args(sglang_server_concurrency=2, rollout_batch_size=5, over_sampling_batch_size=5)
    engine.delay = lambda conversation: 0.01
    await generate_rollout_async(args, 0, make_source(args))
    assert engine.most_running == 2


async def test_seeds_differ_between_samples_and_repeat_between_runs(engine, make_args, make_source):
    args = make_args()
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    first = sorted(body["sampling_params"]["sampling_seed"] for body in engine.seen("generate"))
    assert first == [42 + i for i in range(6)]
    engine.calls.clear()
    await generate_rollout_async(args, 1, source)
    assert sorted(body["sampling_params"]["sampling_seed"] for body in engine.seen("generate"))[0] == 48


async def test_a_filtered_group_is_replaced_and_counted(engine, make_args, make_source):
    args = make_args(dynamic_sampling_filter_path=PLUGINS + "drop_odd_groups", over_sampling_batch_size=4)
    source = make_source(args)
    output = await generate_rollout_async(args, 0, source)
    assert [group[0].group_index % 2 for group in output.samples] == [0, 0, 0]
    assert output.metrics["rollout/dynamic_filter/drop_odd"] == source.ledger.filtered >= 2
    assert balanced(source)


async def test_surplus_is_aborted_and_dropped(engine, make_args, make_source):
    args = make_args(over_sampling_batch_size=5)
    engine.delay = lambda conversation: 0.0 if question(conversation) < 3 else NEVER
    source = make_source(args)
    output = await generate_rollout_async(args, 0, source)
    assert [group[0].group_index for group in output.samples] == [0, 1, 2]
    assert engine.aborts >= 1
    assert engine.running == 0
    assert source.ledger.dropped == {"aborted": 2} and source.get_buffer_length() == 0
    assert output.metrics == {"rollout/dropped/aborted": 2}
    assert balanced(source)


async def test_partial_rollout_goes_on_where_it_was_aborted(engine, make_args, make_source):
    args = make_args(
        partial_rollout=True,
        over_sampling_batch_size=4,
        mask_offpolicy_in_partial_rollout=True,
        n_samples_per_prompt=1,
    )
    long_answer = "abcdefghijklmnopqrst"
    engine.answer = lambda conversation: long_answer if question(conversation) == 3 else "ok"
    engine.delay = StopsAfter(3, tokens=6)
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    assert source.get_buffer_length() == 1
    begun = source.buffer[0][0]
    assert begun.status == Sample.Status.ABORTED
    before = begun.response_length
    assert before == 6
    assert begun.metadata["start_rollout_id"] == 0
    assert balanced(source)

    engine.delay = lambda conversation: 0.0
    engine.weight_version = "2"
    args.over_sampling_batch_size = 3  # else three others may be finished first
    output = await generate_rollout_async(args, 1, source)

    finished = output.samples[0][0]
    assert finished.group_index == 3
    assert finished.response == long_answer + "<|im_end|>"
    assert finished.loss_mask == [0] * before + [1] * (21 - before)
    assert finished.weight_versions == ["1", "2"]
    assert finished.version_spans == [("1", before), ("2", 21 - before)]
    assert balanced(source)
    others = sum(group[0].response_length for group in output.samples[1:])
    args.rollout_num_gpus = 1
    perf = compute_perf_metrics_from_samples(args, flatten(output.samples), rollout_time=1.0)
    assert perf["tokens_per_gpu_per_sec"] == perf["effective_tokens_per_gpu_per_sec"] == 21 - before + others
    assert perf["longest_sample_tokens_per_sec"] == 21 - before
    assert EARLIER_TOKENS not in without_answers([finished])[0].metadata


async def test_nothing_of_a_finished_sample_is_trained_on_where_older_tokens_are_masked(make_args):
    """It comes back as it is but for that; without one of the two flags its mask stays."""
    for partial, masked, expected in (
        (True, True, [0, 0, 0]),
        (True, False, [1, 0, 1]),
        (False, True, [1, 0, 1]),
    ):
        args = make_args(partial_rollout=partial, mask_offpolicy_in_partial_rollout=masked)
        done = Sample(index=4, tokens=[1, 2, 3, 4], response_length=3, response="abc", reward=1.0)
        done.status, done.loss_mask = Sample.Status.COMPLETED, [1, 0, 1]
        assert await generate_and_rm(args, done, {}) is done
        assert (done.loss_mask, done.tokens, done.reward) == (expected, [1, 2, 3, 4], 1.0)


def test_a_group_is_as_old_as_the_oldest_weights_that_made_a_token_of_it():
    spans = Sample(version_spans=[("7", 3), (None, 1), ("4", 2)])
    assert oldest_version([Sample(weight_versions=["5", "12"]), [spans]]) == 4
    assert oldest_version([Sample(weight_versions=["latest"])]) is None


async def test_an_abort_does_not_queue_behind_generations(engine, make_args, make_source):
    args = make_args(over_sampling_batch_size=5, sglang_server_concurrency=4)
    engine.delay = lambda conversation: 0.0 if question(conversation) < 3 else NEVER
    source = make_source(args)
    assert len((await generate_rollout_async(args, 0, source)).samples) == 3
    assert balanced(source)


async def test_a_resumed_response_is_whole_text(engine, make_args, make_source):
    """The abort may part the tokens of a character; neither half is text."""
    args = make_args(partial_rollout=True, over_sampling_batch_size=4, n_samples_per_prompt=1)
    engine.answer = lambda conversation: "aé字b" if question(conversation) == 3 else "ok"
    engine.delay = StopsAfter(3, tokens=2)
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    assert source.buffer[0][0].response_length == 2
    engine.delay = lambda conversation: 0.0
    args.over_sampling_batch_size = 3
    output = await generate_rollout_async(args, 1, source)
    assert output.samples[0][0].response == "aé字b<|im_end|>"


async def test_prompt_and_response_stay_within_the_context(engine, make_args, make_source):
    args = make_args(n_samples_per_prompt=1, rollout_max_context_len=20)
    engine.answer = lambda conversation: "x" * 100
    output = await generate_rollout_async(args, 0, make_source(args))
    for (sample,) in output.samples:
        assert (len(sample.tokens), sample.status) == (20, Sample.Status.TRUNCATED)


@pytest.mark.parametrize("source", [plugins.OwnOrder, plugins.OwnBuffer])
async def test_a_data_source_of_ones_own_may_keep_no_books(engine, make_args, source):
    args = make_args(over_sampling_batch_size=5, partial_rollout=True)
    engine.delay = lambda conversation: 0.05 if question(conversation) < 3 else NEVER
    mine = source(args)
    assert len((await generate_rollout_async(args, 0, mine)).samples) == 3
    engine.delay = lambda conversation: 0.0
    assert len((await generate_rollout_async(args, 1, mine)).samples) == 3


async def test_a_buffer_filter_may_discard_groups(engine, make_args, make_source):
    args = make_args(
        over_sampling_batch_size=5, partial_rollout=True, buffer_filter_path=PLUGINS + "newest_only"
    )
    engine.delay = lambda conversation: 0.05 if question(conversation) < 3 else NEVER
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    assert source.get_buffer_length() == 2
    engine.delay = lambda conversation: 0.0
    await generate_rollout_async(args, 1, source)
    assert source.ledger.dropped["buffer_filter"] >= 1
    assert balanced(source)


async def test_group_reward_gets_the_whole_group(engine, make_args, make_source):
    args = make_args(group_rm=True, custom_rm_path=PLUGINS + "group_rm")
    output = await generate_rollout_async(args, 0, make_source(args))
    assert [[s.reward for s in group] for group in output.samples] == [[0.0, 1.0]] * 3
    assert sorted(plugins.calls) == [[0, 1], [2, 3], [4, 5]]


async def test_a_split_sample_stays_together_and_is_scored(engine, make_args, make_source):
    args = make_args(
        custom_generate_function_path=PLUGINS + "split_generate", custom_rm_path=PLUGINS + "split_rm"
    )
    output = await generate_rollout_async(args, 0, make_source(args))
    assert [[len(split) for split in group] for group in output.samples] == [[2, 2]] * 3
    assert {s.reward for group in output.samples for split in group for s in split} == {0.5}
    assert plugins.calls == [False] * 6


async def test_samples_made_anew_belong_to_the_group_of_their_prompt(engine, make_args, make_source):
    args = make_args(custom_generate_function_path=PLUGINS + "anew_generate")
    output = await generate_rollout_async(args, 0, make_source(args))
    assert [[s.group_index for split in group for s in split] for group in output.samples] == [
        [0] * 4,
        [1] * 4,
        [2] * 4,
    ]
    assert [s.index for split in output.samples[1] for s in split] == [2, 2, 3, 3]


async def test_hooks_see_every_sample_and_may_replace_it(engine, make_args, make_source):
    args = make_args(rollout_sample_hook_path=[PLUGINS + "cut_hook", PLUGINS + "replace_hook"])
    output = await generate_rollout_async(args, 7, make_source(args))
    for group in output.samples:
        for sample in group:
            assert sample.metadata["hooked"] == (7, False)
            assert sample.metadata["replaced"] is True


async def test_a_hook_may_make_numbers_of_what_generation_says(engine, make_args, make_source):
    own = {"custom_generate_function_path": PLUGINS + "self_scored_generate"}
    args = make_args(**own, rollout_sample_hook_path=[PLUGINS + "grade_hook"])
    output = await generate_rollout_async(args, 0, make_source(args))
    assert {sample.reward for group in output.samples for sample in group} == {1.0}


async def test_batch_hooks_run_and_what_they_fetch_is_accounted_for(engine, make_args, make_source):
    args = make_args(
        rollout_sample_filter_path=PLUGINS + "remove_short",
        rollout_all_samples_process_path=PLUGINS + "look_at_all",
    )
    source = make_source(args)
    output = await generate_rollout_async(args, 0, source)
    assert [[s.remove_sample for s in group] for group in output.samples] == [[True, False]] * 3
    assert plugins.calls == [(3, 2)]
    assert source.ledger.dropped == {"hook": 2}
    assert balanced(source)


async def test_any_object_with_the_methods_is_a_data_source(engine, make_args):
    args = make_args(n_samples_per_prompt=1)
    output = await generate_rollout_async(args, 0, plugins.BareSource(args))
    assert len(output.samples) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"custom_rm_path": PLUGINS + "failing_rm"},
            r"plugins\.failing_rm failed on sample \d of group \d: KeyError",
        ),
        ({"custom_rm_path": PLUGINS + "silent_rm"}, r"plugins\.silent_rm returned None for sample \d"),
        ({"custom_rm_path": None}, r"--rm-type None: expected one of math"),
        ({"custom_rm_path": PLUGINS + "nan_rm"}, r"plugins\.nan_rm returned nan for sample \d of group \d"),
        (
            {"custom_rm_path": PLUGINS + "nan_group_rm", "group_rm": True, "reward_key": "score"},
            r"plugins\.nan_group_rm returned {'score': inf} for sample \d",
        ),
        (
            {"custom_generate_function_path": PLUGINS + "nan_reward_generate"},
            r"plugins\.nan_reward_generate returned nan for sample \d of group \d, expected a finite number",
        ),
        (
            {"custom_generate_function_path": PLUGINS + "failing_generate"},
            r"plugins\.failing_generate failed on sample 3 of group 1: LookupError: tool is gone",
        ),
        (
            {"custom_generate_function_path": PLUGINS + "wrong_generate"},
            r"plugins\.wrong_generate returned 'text' for sample \d",
        ),
        (
            {"custom_generate_function_path": PLUGINS + "nan_generate"},
            r"plugins\.nan_generate: rollout_log_probs of sample 3 of group 1 are nan at position 1 of \d+",
        ),
        (
            {"custom_generate_function_path": PLUGINS + "text_log_probs_generate"},
            r"plugins\.text_log_probs_generate: rollout_log_probs of sample \d of group \d are \['-0.1'",
        ),
        (
            {"custom_generate_function_path": PLUGINS + "shared_generate"},
            r"plugins\.shared_generate returned one Sample object as its samples 0 and 1 \(sample \d of",
        ),
        (
            {"custom_generate_function_path": PLUGINS + "twice_generate"},
            r"plugins\.twice_generate returned one Sample object as its samples 0 and 1 \(sample \d of group",
        ),
        (
            {"custom_generate_function_path": PLUGINS + "self_scored_generate"},
            r"plugins\.self_scored_generate returned 'good' for sample \d of group \d, expected",
        ),
        (
            {
                "custom_generate_function_path": PLUGINS + "anew_generate",
                "rollout_sample_hook_path": [PLUGINS + "spoil_hook"],
            },
            r"plugins\.anew_generate and \S+plugins\.spoil_hook returned 'bad' for sample \d of group \d",
        ),
        (
            {"custom_rm_path": PLUGINS + "text_rm"},
            r"plugins\.text_rm returned '1.0' for sample \d of group \d, expected a finite number",
        ),
        (
            {"custom_rm_path": PLUGINS + "list_rm"},
            r"plugins\.list_rm returned \[1.0\] for sample \d of group \d, expected a finite number",
        ),
        (
            {"custom_rm_path": PLUGINS + "text_group_rm", "group_rm": True},
            r"plugins\.text_group_rm returned 'good' for sample \d of group \d, expected a finite number",
        ),
        (
            {"custom_rm_path": PLUGINS + "exiting_rm"},
            r"plugins\.exiting_rm failed on sample \d of group \d: SystemExit: gave up",
        ),
        (
            {"dynamic_sampling_filter_path": PLUGINS + "failing_filter"},
            r"plugins\.failing_filter failed on samples \[\d, \d\]: ZeroDivisionError: oh",
        ),
        ({"apply_chat_template": False}, r"sample \d is a list of messages: pass --apply-chat-template"),
        (
            {"custom_generate_function_path": PLUGINS + "hanging_generate", "rollout_timeout": 0.2},
            r"rollout 0: 3 groups unfinished after 0.2 s .* first sample \[0, 2, 4\]",
        ),
    ],
)
async def test_user_code_that_fails_ends_the_rollout_with_its_name(
    engine, make_args, make_source, overrides, message
):
    plugins._shared.clear()
    args = make_args(**overrides)
    with pytest.raises(RolloutError, match=message):
        await generate_rollout_async(args, 0, make_source(args))


async def test_a_request_that_the_engine_refuses_ends_the_rollout(engine, make_args, make_source):
    args = make_args()
    engine.answers["generate"] = JSONResponse({"error": "no such thing"}, status_code=400)
    with pytest.raises(RolloutError, match=r"generate failed on sample \d .*HTTP 400: .*no such thing"):
        await generate_rollout_async(args, 0, make_source(args))


@pytest.mark.parametrize("partial", [False, True])
async def test_a_sample_that_its_generate_function_aborts_costs_its_group_only(
    engine, make_args, make_source, partial, caplog
):
    path = PLUGINS + "giving_up_generate"
    args = make_args(
        custom_generate_function_path=path, partial_rollout=partial, over_sampling_batch_size=1
    )  # so that group 3 alone comes in the place of group 1
    source = make_source(args)
    output = await generate_rollout_async(args, 0, source)
    assert [group[0].group_index for group in output.samples] == [0, 2, 3]
    assert output.metrics["rollout/given_up"] == 1
    assert [line for line in caplog.messages if "a generate function aborted one of them" in line]
    assert (1 in [group[0].group_index for group in source.buffer]) == partial
    assert balanced(source)


async def test_an_aborted_sample_with_a_reward_is_what_its_function_says(engine, make_args, make_source):
    args = make_args(custom_generate_function_path=PLUGINS + "worthless_generate")
    output = await generate_rollout_async(args, 0, make_source(args))
    assert output.samples[1][1].status is Sample.Status.ABORTED
    assert output.samples[1][1].reward == -1.0


@pytest.mark.parametrize("reward", ["nested_group_rm", "per_execution_group_rm", "flat_group_rm"])
async def test_a_group_reward_gets_split_samples_as_lists(engine, make_args, make_source, reward):
    args = make_args(
        custom_generate_function_path=PLUGINS + "split_generate",
        custom_rm_path=PLUGINS + reward,
        group_rm=True,
    )
    output = await generate_rollout_async(args, 0, make_source(args))
    expected = [[1.0, 1.0], [2.0, 2.0]] if reward == "per_execution_group_rm" else [[1.0, 2.0], [3.0, 4.0]]
    for group in output.samples:
        assert [[s.reward for s in split] for split in group] == expected


async def test_a_group_reward_that_does_not_fit_the_group_is_named(engine, make_args, make_source):
    args = make_args(
        custom_generate_function_path=PLUGINS + "split_generate",
        custom_rm_path=PLUGINS + "short_group_rm",
        group_rm=True,
    )
    with pytest.raises(
        RolloutError, match=r"short_group_rm returned \[1.0\] for samples .* expected 2 rewards"
    ):
        await generate_rollout_async(args, 0, make_source(args))


async def test_a_hook_gets_only_the_keywords_that_it_takes(engine, make_args, make_source):
    args = make_args(rollout_sample_hook_path=[PLUGINS + "bare_hook", PLUGINS + "evaluation_hook"])
    output = await generate_rollout_async(args, 0, make_source(args))
    assert {s.metadata["hooked"] for group in output.samples for s in group} == {(True, False)}


async def test_a_model_that_nobody_serves_is_the_default_one(make_args):
    args = make_args(sglang_router_port=7)
    args.sglang_model_routers = {"judge": ("127.0.0.2", 8)}
    assert get_model_url(args, "judge") == "http://127.0.0.2:8/generate"
    assert get_model_url(args, "teacher", "/workers") == "http://127.0.0.1:7/workers"


async def test_an_answer_of_no_policy_is_told_of_at_once_where_there_are_several(
    engine, make_args, make_source
):
    """By the name of the function, before the others of the rollout are made."""
    path = PLUGINS + "shared_generate"
    both = {name: make_args() for name in ("solver", "judge")}
    args = make_args(custom_generate_function_path=path, trained_policies=both, rollout_batch_size=50)
    wanted = (
        r"shared_generate: sample \d+ of group \d+: policy is None \(wanted: solver or judge, as --policies"
    )
    with pytest.raises(RolloutError, match=wanted):
        await generate_rollout_async(args, 0, make_source(args))


async def test_after_a_failure_the_next_rollout_works(engine, make_args, make_source):
    args = make_args(custom_generate_function_path=PLUGINS + "failing_generate")
    source = make_source(args)
    with pytest.raises(RolloutError):
        await generate_rollout_async(args, 0, source)
    args.custom_generate_function_path = None
    output = await generate_rollout_async(args, 1, source)
    assert len(output.samples) == 3


async def test_the_session_goes_to_the_router_for_sticky_routing(engine, make_args, make_source):
    args = make_args(router_policy="consistent_hashing")
    output = await generate_rollout_async(args, 0, make_source(args))
    sessions = {s.session_id for group in output.samples for s in group}
    assert {call.headers["x-smg-routing-key"] for call in engine.calls if call.path == "generate"} == sessions
    assert len(sessions) == 6


async def test_an_abort_is_repeated_at_growing_intervals_until_nothing_runs(make_args, monkeypatch):
    state, intervals = GenerateState(make_args()), []
    last = asyncio.get_running_loop().create_future()

    async def answer(*args, **kwargs):
        return {"workers": []}

    async def wait(pending, timeout):
        intervals.append(timeout)
        if len(intervals) == 7:
            last.set_result([])

    monkeypatch.setattr(sglang_rollout, "get", answer)
    monkeypatch.setattr(sglang_rollout, "abort_servers_until_idle", answer)
    monkeypatch.setattr(asyncio, "wait", wait)
    state.pending = {last: None}
    assert await sglang_rollout.abort(state.args, 0) == [[]]
    assert intervals == [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0]
