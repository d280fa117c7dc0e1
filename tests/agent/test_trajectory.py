"""Turns of an agent become samples: what was sampled is trained once, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.agent.trajectory import (
    DriftKind,
    TrajectoryManager,
    TurnRecord,
    flatten_content,
    plain_message,
    plain_messages,
)
from slime.utils.types import Sample

USER = {"role": "user", "content": "go"}
META = {"weight_version": "3", "finish_reason": {"type": "stop"}, "prompt_tokens": 2, "cached_tokens": 1}
NUCLEI = {"top_p_token_ids": [8, 9], "top_p_token_offsets": [0, 1, 2]}


def said(text):
    return {"role": "assistant", "content": text}


def heard(text):
    return {"role": "tool", "content": text}


def turn(prompt, output, reason="stop", **options):
    return TurnRecord(prompt, output, reason, [-float(token) for token in output], meta_info=META, **options)


def record(manager, prompt, output, messages, reply, tool_errors=0, **options):
    return manager.record_turn(
        "s",
        turn=turn(prompt, output, **options),
        prompt_messages=messages,
        response_message=reply,
        tool_errors=tool_errors,
    )


def samples(manager, **options):
    return manager.get_trajectory("s", base_sample=Sample(index=7, group_index=1), **options)


def trained(sample):
    """The trained tokens, and that their log-probs are their own."""
    start = len(sample.tokens) - sample.response_length
    pairs = zip(sample.tokens[start:], sample.loss_mask, sample.rollout_log_probs, strict=True)
    triples = list(pairs)
    assert all(value == (-float(token) if mask else 0.0) for token, mask, value in triples)
    return [token for token, mask, _ in triples if mask]


def test_turns_that_go_on_are_one_sample():
    manager = TrajectoryManager()
    assert record(manager, [1, 2], [3, 4], [USER], said("a")) is DriftKind.FORK
    follow_up = [USER, said("a"), heard("b")]
    assert record(manager, [1, 2, 3, 4, 5, 6], [7], follow_up, said("c")) is DriftKind.CLEAN
    (sample,) = samples(manager, reward=0.5, extra_metadata={"task": "x"})
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 7] and sample.response_length == 5
    assert sample.loss_mask == [1, 1, 0, 0, 1] and trained(sample) == [3, 4, 7]
    assert sample.token_versions == ["3", "3", None, None, "3"] and sample.weight_versions == ["3", "3"]
    assert (sample.reward, sample.status, sample.rollout_id) == (0.5, Sample.Status.COMPLETED, None)
    assert (sample.index, sample.group_index) == (7, 1)
    assert sample.metadata == {"round_number": 2, "task": "x"}
    assert sample.prefix_cache_info.cached_tokens == 2
    assert manager.turn_count("s") == 2 and manager.has_session("s")
    manager.drop_session("s")
    manager.drop_session("s")
    assert not manager.has_session("s") and samples(manager) == []


def test_a_second_try_and_a_helper_are_samples_of_the_same_execution():
    manager = TrajectoryManager()
    record(manager, [1, 2], [3], [USER], said("a"))
    record(manager, [1, 2], [4], [USER], said("b"))
    record(manager, [9], [8], [{"role": "user", "content": "help"}], said("c"))
    made = samples(manager, reward=1.0)
    assert [trained(sample) for sample in made] == [[3], [4], [8]]
    assert {sample.rollout_id for sample in made} == {7} and {sample.reward for sample in made} == {1.0}
    # The first try goes on: its answer is trained there, and only there.
    record(manager, [1, 2, 3, 5], [6], [USER, said("a"), heard("x")], said("d"))
    assert [trained(sample) for sample in samples(manager)] == [[3, 6], [4], [8]]


def test_a_small_drift_is_replaced_and_not_trained_on():
    manager = TrajectoryManager(fork_threshold_tokens=2)
    record(manager, [1, 2], [3, 4, 5], [USER], said("a"))
    kind = record(manager, [1, 2, 3, 4, 6, 7], [8], [USER, said("a"), heard("b")], said("c"))
    assert kind is DriftKind.REALIGN
    (sample,) = samples(manager)
    assert sample.tokens == [1, 2, 3, 4, 6, 7, 8] and trained(sample) == [8]


def test_what_was_replaced_what_chains_share_and_failed_calls_are_counted():
    manager = TrajectoryManager(fork_threshold_tokens=2)
    record(manager, [1, 2], [3, 4, 5], [USER], said("a"), tool_errors=1)
    record(manager, [1, 2, 3, 4, 6, 7], [8], [USER, said("a"), heard("b")], said("c"), tool_errors=2)
    record(manager, [1, 2, 3, 9], [8], [USER, heard("d")], said("e"))
    record(manager, [7], [8], [heard("d")], said("e"))
    counts = [{"round_number": 1, "realigned_tokens": 1, "tool_errors": 3}]
    counts += [{"round_number": 1, "duplicated_prefix_tokens": 3}, {"round_number": 1}]
    assert [sample.metadata for sample in samples(manager)] == counts


@pytest.mark.parametrize(("prompt", "threshold"), [([1, 2, 3, 6, 7], 1), ([1, 9, 3, 4, 5], 100)])
def test_a_drift_beyond_the_threshold_or_in_the_prompt_forks(prompt, threshold):
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    record(manager, [1, 2], [3, 4, 5], [USER], said("a"))
    assert record(manager, prompt, [8], [USER, said("a")], said("c")) is DriftKind.FORK
    assert [trained(sample) for sample in samples(manager)] == [[3, 4, 5], [8]]
    assert samples(manager)[1].tokens == [*prompt, 8]


@pytest.mark.parametrize(
    ("longest", "tokens", "kept", "status"),
    [
        (0, 6, [3, 4, 6], "completed"),
        (6, 6, [3, 4, 6], "completed"),
        (5, 5, [3, 4], "truncated"),
        (3, 3, [3], "truncated"),
    ],
)
def test_what_is_too_long_is_cut_off(longest, tokens, kept, status):
    manager = TrajectoryManager()
    record(manager, [1, 2], [3, 4], [USER], said("a"))
    record(manager, [1, 2, 3, 4, 5], [6], [USER, said("a"), heard("b")], said("c"))
    (sample,) = samples(manager, max_sample_tokens=longest)
    assert len(sample.tokens) == tokens and trained(sample) == kept and sample.status.value == status


def test_a_part_of_an_answer_has_its_version_and_nuclei_and_nothing_of_the_rest():
    manager = TrajectoryManager()
    answer = TurnRecord([1], [2, 3], "stop", [-2.0, -3.0], meta_info=META | NUCLEI)
    manager.record_turn("s", turn=answer, prompt_messages=[USER], response_message=said("a"))
    assert samples(manager)[0].rollout_top_p_token_ids == [8, 9]
    (sample,) = samples(manager, max_sample_tokens=2)
    assert sample.token_versions == ["3"] and sample.weight_versions == ["3"]
    assert (sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets) == ([8], [0, 1])


def test_the_last_turn_says_how_it_ended():
    manager = TrajectoryManager()
    record(manager, [1], [2], [USER], said("a"), reason="length")
    assert samples(manager)[0].status is Sample.Status.TRUNCATED


def test_calls_of_tools_are_the_same_as_text_and_as_mappings():
    manager = TrajectoryManager()
    text = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    mapping = {"id": "2", "function": {"name": "f", "arguments": {"x": 1}}}
    record(manager, [1], [2], [USER], {**said(""), "tool_calls": [text]})
    assert manager.continued("s", [USER, {"role": "assistant", "content": None, "tool_calls": [mapping]}])
    other = {"id": "1", "function": {"name": "f", "arguments": {"x": 2}}}
    assert not manager.continued("s", [USER, {**said(""), "tool_calls": [other]}])
    assert not manager.continued("s", [USER])


def test_an_answer_without_its_log_probs_is_refused():
    with pytest.raises(ValueError, match="session s: 2 tokens but 1 log-probs"):
        TrajectoryManager().record_turn(
            "s",
            turn=TurnRecord([1], [2, 3], "stop", [-1.0]),
            prompt_messages=[USER],
            response_message=said("a"),
        )


def test_content_is_text_or_parts():
    assert flatten_content([{"type": "text", "text": "a"}, "b", {"type": "other"}]) == "ab"
    assert flatten_content(None) == "" and flatten_content("c") == "c"


@given(st.data())
def test_every_answer_is_trained_in_one_sample_at_most_and_whole(data):
    """An agent that goes on with any earlier conversation, and changes what it sends at will."""
    manager, fresh, histories = (
        TrajectoryManager(fork_threshold_tokens=3),
        iter(range(10, 10_000)),
        [([], [1])],
    )
    made = []
    for _ in range(data.draw(st.integers(1, 8))):
        messages, tokens = data.draw(st.sampled_from(histories))
        drop = data.draw(st.integers(0, min(4, len(tokens) - 1)))
        prompt = [*tokens[: len(tokens) - drop], *(next(fresh) for _ in range(data.draw(st.integers(0, 3))))]
        output = [next(fresh) for _ in range(data.draw(st.integers(1, 3)))]
        asked = [*messages, heard(str(next(fresh)))]
        record(manager, prompt, output, asked, said(str(output)))
        histories.append(([*asked, said(str(output))], [*prompt, *output]))
        made.append((prompt, output))
    found = [trained(sample) for sample in samples(manager)]
    flat = [token for tokens in found for token in tokens]
    assert len(flat) == len(set(flat))
    whole = [output for _, output in made if set(output) <= set(flat)]
    assert sorted(flat) == sorted(token for output in whole for token in output)
    # The last one has nothing after it that could have cut it.
    assert made[-1][1] in whole
    sequences = [sample.tokens for sample in samples(manager)]
    assert any(tokens == [*made[-1][0], *made[-1][1]] for tokens in sequences)


def test_a_turn_that_is_cut_off_keeps_the_versions_of_what_is_left():
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    manager, meta = TrajectoryManager(), META | {"weight_version": "4", "weight_versions": spans}
    made = TurnRecord([1, 2], [3, 4, 5], "stop", [-3.0, -4.0, -5.0], meta_info=meta)
    manager.record_turn("s", turn=made, prompt_messages=[USER], response_message=said("a"))
    (sample,) = samples(manager, max_sample_tokens=4)
    assert sample.version_spans == [("3", 1), ("4", 1)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_prompt_is_compared_once_its_chain_has_gone_on_without_it(goes_on):
    """Two requests of a conversation may be under way at once; the second then differs from what is held."""
    manager = TrajectoryManager(fork_threshold_tokens=0)
    manager.record_turn("s", turn=turn([1, 2], [3]), prompt_messages=[USER], response_message=said("a"))
    messages = [USER, said("a"), USER]
    chain = manager.continued("s", messages)
    held = (chain, chain.turns)
    if goes_on:
        manager.record_turn(
            "s", turn=turn([1, 2, 3, 4], [5]), prompt_messages=messages, response_message=said("b")
        )
        messages = [*messages, said("b"), USER]
    kind = manager.record_turn(
        "s",
        turn=turn([1, 2, 3, 9], [6]),
        prompt_messages=messages,
        response_message=said("c"),
        begins_with=held,
    )
    assert kind is (DriftKind.FORK if goes_on else DriftKind.CLEAN)
    assert chain.tokens == ([1, 2, 3, 4, 5] if goes_on else [1, 2, 3, 9, 6])


def test_a_chain_goes_on_with_what_is_new_and_holds_no_list_for_each_token():
    """A turn has the whole history; what was made of all of it each time would be the square of it."""
    manager, messages, ids = TrajectoryManager(), [USER], [1]
    meta = META | {"output_token_logprobs": [[-1.0, 3, None]], "output_top_logprobs": [[[-1.0, 3, None]]]}
    held = []
    for number in range(3):
        made = TurnRecord(ids, [3], "stop", [-1.0], meta_info=meta)
        manager.record_turn("s", turn=made, prompt_messages=messages, response_message=said(f"{number}"))
        messages, ids = [*messages, said(f"{number}"), USER], [*ids, 3, 1]
        chain = manager.continued("s", messages)
        assert [id(message) for message in chain.messages[: len(held)]] == held
        held = [id(message) for message in chain.messages]
    assert chain.messages == plain_messages(messages[:-1])
    kept = [piece.turn for piece in chain.pieces if piece.turn]
    assert [(turn.output_ids, turn.output_log_probs, turn.prompt_ids) for turn in kept] == [
        ([3], [-1.0], [])
    ] * 3
    assert all(turn.meta_info == META for turn in kept) and "output_token_logprobs" in made.meta_info


def test_a_message_is_one_that_was_said_if_it_says_the_same():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    written = {"id": "c", "function": {"name": "f", "arguments": '{"x":1}'}}
    parts = [{"type": "text", "text": "a"}]
    messages = [
        *({"role": role, "content": text} for role in ("user", "tool") for text in ("a", " a", parts, None)),
        *({"role": "assistant", "content": text} for text in ("a", " a", "<think>b</think>\na", parts, "")),
        *({"role": "assistant", "content": "a", "tool_calls": calls} for calls in ([call], [written], None)),
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
    ]
    for one in messages:
        manager = TrajectoryManager()
        manager.record_turn("s", turn=turn([1], [2]), prompt_messages=[one], response_message=said("b"))
        for other in messages:
            found = manager.continued("s", [other, said("b"), USER])
            assert bool(found) == (plain_message(one) == plain_message(other)), (one, other)


def test_what_becomes_of_a_turn_after_it_is_recorded_changes_nothing_that_is_trained():
    manager = TrajectoryManager()
    turn = TurnRecord([1, 2], [3, 4], "stop", [-0.5, -0.25], meta_info={"weight_version": "1"})
    said = {"role": "assistant", "content": "a"}
    manager.record_turn(
        "s", turn=turn, prompt_messages=[{"role": "user", "content": "q"}], response_message=said
    )
    turn.prompt_ids.append(9)
    turn.output_ids.append(9)
    turn.output_log_probs[0] = 9.0
    turn.meta_info["weight_version"] = "9"
    (sample,) = manager.get_trajectory("s", base_sample=Sample())
    assert (sample.tokens, sample.rollout_log_probs) == ([1, 2, 3, 4], [-0.5, -0.25])
    assert sample.version_spans == [("1", 2)]
