"""Responses that go on over an update of the weights: their log-probs, versions and prefixes."""

import pytest
import torch

from slime.backends.embedded_engine.sequence import LogprobOptions
from slime.utils.tensor_bucket import serialize_tensors
from tests.backends.embedded_engine.test_scheduler import make_state, run_all, sequence
from tests.engines.embedded import make_model, token_logprobs

pytestmark = pytest.mark.slow

WANTED = LogprobOptions(wanted=True)
APART = 0.05
"""Nats by which two ways to compute a log-prob differ at least on average, if they are told apart."""


@pytest.fixture(scope="module")
def models(checkpoint):
    """The weights that the engine begins with, and two later versions."""
    return [checkpoint[1], *(make_model("qwen3", seed) for seed in (11, 12))]


def update(state, mode, model, version):
    """What a trainer asks of an engine, one command after the other."""
    state.engine.pause(mode)
    flushed = state.engine.flush()
    state.updater.begin("all")
    tensors = serialize_tensors([*model.state_dict().items()], share=False)
    state.updater.from_tensors([tensors], None, version, False)
    state.updater.end()
    state.engine.resume()
    return flushed


def steps(state, count):
    for _ in range(count):
        state.engine.scheduler.step(admit=True)


def ids_of(one):
    return one.prompt_ids + one.output_ids


def two_of(length):
    """Two requests of this many new tokens."""
    prompts = {"a": list(range(5, 14)), "bc": list(range(5, 9))}
    return [sequence(name, prompt, WANTED, max_new_tokens=length) for name, prompt in prompts.items()]


def found(one):
    return torch.tensor(one.output_logprobs.of_tokens)


def anew(model, one):
    """Log-probs of a response with everything computed by one model."""
    return torch.tensor(token_logprobs(model, ids_of(one))[len(one.prompt_ids) - 1 :])


def kept(models, one, ends):
    """Log-probs of a response whose tokens up to ``ends`` each model has computed; the last one the rest."""
    ids, cache, logits, start = ids_of(one), None, [], 0
    with torch.no_grad():
        for model, end in zip(models, [*ends, len(ids)], strict=True):
            out = model(torch.tensor([ids[start:end]]), past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, end
            logits.append(out.logits[0])
    rows = torch.cat(logits).log_softmax(-1)[:-1]
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[len(one.prompt_ids) - 1 :, 0]


def spans(one):
    return [(span.version, span.start, span.end) for span in one.spans]


def test_a_retracted_response_goes_on_as_if_the_new_weights_had_read_all_of_it(checkpoint, models):
    state = make_state(checkpoint)
    ones = two_of(30)
    state.engine.scheduler.waiting.extend(ones)
    steps(state, 8)
    assert update(state, "retract", models[1], "1")
    steps(state, 7)
    assert update(state, "retract", models[2], "2")
    run_all(state.engine.scheduler)
    for one in ones:
        assert one.num_retractions == 2
        assert spans(one) == [("default", 0, 9), ("1", 9, 17), ("2", 17, 30)]
        wanted = [anew(model, one) for model in models]
        for model, (_, start, end) in enumerate(spans(one)):
            torch.testing.assert_close(found(one)[start:end], wanted[model][start:end], rtol=0, atol=1e-5)
        others = kept(models, one, [len(one.prompt_ids) + made for made in (8, 16)])
        assert (found(one) - others)[9:].abs().mean() > APART


def test_a_response_in_place_goes_on_with_what_older_weights_read(checkpoint, models):
    state = make_state(checkpoint)
    ones = two_of(30)
    state.engine.scheduler.waiting.extend(ones)
    steps(state, 8)
    assert not update(state, "in_place", models[1], "1")
    steps(state, 8)
    assert not update(state, "in_place", models[2], "2")
    run_all(state.engine.scheduler)
    for one in ones:
        assert one.num_retractions == 0
        assert spans(one) == [("default", 0, 9), ("1", 9, 17), ("2", 17, 30)]
        # A token is computed when the next one is made.
        wanted = kept(models, one, [len(one.prompt_ids) + made for made in (8, 16)])
        torch.testing.assert_close(found(one), wanted, rtol=0, atol=1e-5)
        assert (found(one) - anew(models[2], one))[17:].abs().mean() > APART


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_long_prompt_is_computed_anew_or_goes_on_where_it_was(checkpoint, models, mode):
    state = make_state(checkpoint, chunked_prefill_size=8)
    one = sequence("a", list(range(30)), WANTED, max_new_tokens=6)
    state.engine.scheduler.waiting.append(one)
    steps(state, 2)
    update(state, mode, models[1], "1")
    run_all(state.engine.scheduler)
    wanted = anew(models[1], one) if mode == "retract" else kept(models[:2], one, [16])
    torch.testing.assert_close(found(one), wanted, rtol=0, atol=1e-5)
    assert spans(one) == [("1", 0, 6)]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_no_response_starts_from_a_prompt_that_older_weights_read(checkpoint, models, mode):
    state = make_state(checkpoint)
    scheduler = state.engine.scheduler
    before, after, beside = (sequence(n, [1, 2, 3, 4], WANTED, max_new_tokens=20) for n in ("a", "b", "cd"))
    scheduler.waiting.append(before)
    steps(state, 3)
    update(state, mode, models[1], "1")
    scheduler.waiting.append(after)
    steps(state, 2)
    scheduler.waiting.append(beside)
    run_all(scheduler)
    assert (after.cached_tokens, beside.cached_tokens) == (0, 4)
    for one in (after, beside):
        torch.testing.assert_close(found(one), anew(models[1], one), rtol=0, atol=1e-5)
    ended = before.finish_reason["type"], len(before.output_ids)
    assert ended == (("abort", 4) if mode == "abort" else ("length", 20))
