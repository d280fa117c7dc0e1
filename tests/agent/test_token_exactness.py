"""Whatever an agent does with its conversation, what is trained is what the engine recorded, by the token."""

import asyncio
import itertools
import random
from typing import Any

import pytest

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.openai_fields import with_arguments
from slime.agent.adapters.session import TurnRequest
from slime.utils.types import Sample
from tests.agent.chat_templates import FAMILIES, tokenizer_of

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
STOP = "\nObservation:"
WORDS = ("a", " b", "<think>", "</think>", CALL, "<tool_call>", "é", "<|im_end|>", "[INST]", "\n")
TOKENIZERS = {family: tokenizer_of(family) for family in FAMILIES}


class Engine:
    """Answers with random tokens, many of which are no text, and records each of them with its log-prob."""

    def __init__(self, rng, tokenizer):
        self.rng, self.tokenizer, self.records = rng, tokenizer, []
        self.ends = [tokenizer.eos_token_id]
        if (
            tokenizer.eos_token not in tokenizer.chat_template
        ):  # answers end with the beginning of what follows
            self.ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
        self.fresh = itertools.count(1)

    async def __call__(self, url, body, follow=None, **options):
        text = "".join(self.rng.choices(WORDS, k=self.rng.randint(0, 5)))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [i for i in ids if i not in self.ends]
        ids += [self.rng.randrange(256) for _ in range(self.rng.randint(1, 4))]
        reason = self.rng.choice(["stop", "stop", "length"])
        ids += [self.rng.choice(self.ends)] * (reason == "stop")
        log_probs = [-next(self.fresh) / 1024 for _ in ids]
        end: dict[str, Any] = {"type": reason}
        if reason == "length" and self.rng.random() < 0.5:  # or a stop string comes
            ids += self.tokenizer(STOP, add_special_tokens=False)["input_ids"]
            log_probs += [-next(self.fresh) / 1024 for _ in ids[len(log_probs) :]]
            end = {"type": "stop", "matched": STOP}
        triples = [[p, i, None] for p, i in zip(log_probs, ids, strict=True)]
        self.records.append((list(body["input_ids"]), ids, log_probs))
        meta = {"output_token_logprobs": triples, "finish_reason": end, "weight_version": "1"}
        return {"meta_info": meta}


def next_request(rng, histories):
    """Goes on with any earlier conversation: as it was, summarised, cut, or with other instructions."""
    history = list(rng.choice(histories[-2:] if rng.random() < 0.7 else histories))
    kind = rng.choice(["go on", "go on", "go on", "compact", "other system", "other thoughts", "cut"])
    if kind == "compact" and len(history) > 2:
        history = [history[0], {"role": "user", "content": f"so far: {rng.random()}"}]
    elif kind == "other system":
        system = {"role": "system", "content": f"rule {rng.random()}"}
        history = [system, *(m for m in history if m["role"] != "system")]
    elif kind == "other thoughts":
        history = [
            {**m, "reasoning_content": "no"} if m["role"] == "assistant" and rng.random() < 0.5 else m
            for m in history
        ]
    elif kind == "cut":
        history = history[: rng.randint(1, len(history))]
    if history[-1]["role"] == "assistant":
        for _ in range(rng.randint(1, 3)):
            history.append({"role": rng.choice(["tool", "tool", "user"]), "content": rng.choice(WORDS)})
    return history


async def held_conversation(seed, monkeypatch):
    """Has a random conversation; returns whose template it had, the samples, and the engine's records."""
    rng = random.Random(seed)
    family = rng.choice(sorted(set(FAMILIES) - {"gemma"}))
    tokenizer = TOKENIZERS[family]
    engine = Engine(rng, tokenizer)
    monkeypatch.setattr("slime.agent.adapters.common.engine_answer", engine)
    reasons = rng.choice([None, "qwen3"])
    adapter = OpenAIAdapter(
        tokenizer=tokenizer, sglang_url="", tool_parser="hermes", reasoning_parser=reasons
    )
    adapter.open_session("s", sampling_defaults={"max_new_tokens": 50, "stop": [STOP]})
    histories = [[{"role": "user", "content": "q"}]]
    for _ in range(rng.randint(2, 9)):
        messages = next_request(rng, histories)
        turn = await adapter.turn(TurnRequest("s", messages, TOOLS, {}))
        reply = adapter.reply_message(turn.output)
        calls = [with_arguments(call) for call in reply.get("tool_calls", ())]
        histories.append([*messages, {**reply, **({"tool_calls": calls} if calls else {})}])
    samples = await adapter.finish_session("s", base_sample=Sample(index=0), reward=1.0)
    return family, samples, engine.records


def check(samples, records):
    """Each answer is trained once, in a sample that has before it what the engine was asked with."""
    left = {tuple(log_probs): (prompt, ids) for prompt, ids, log_probs in records}
    for sample in samples:
        start = len(sample.tokens) - sample.response_length
        rows = list(zip(sample.tokens[start:], sample.loss_mask, sample.rollout_log_probs, strict=True))
        at = 0
        while at < len(rows):
            if not rows[at][1]:
                assert rows[at][2] == 0.0
                at += 1
                continue
            key = next(key for key in left if key[0] == rows[at][2])
            prompt, ids = left.pop(key)
            assert sample.tokens[: start + at] == prompt
            assert [row[0] for row in rows[at : at + len(ids)]] == ids
            assert tuple(row[2] for row in rows[at : at + len(ids)]) == key
            at += len(ids)
    assert not left, f"{len(left)} answers are trained nowhere"
    assert not any("realigned_tokens" in sample.metadata for sample in samples)


def hold(seeds, monkeypatch):
    for seed in seeds:
        family, samples, records = asyncio.run(held_conversation(seed, monkeypatch))
        try:
            check(samples, records)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {family}: {error}") from error


def test_what_is_trained_is_what_the_engine_recorded(monkeypatch):
    hold(range(40), monkeypatch)


@pytest.mark.nightly
def test_what_is_trained_is_what_the_engine_recorded_in_a_thousand_conversations(monkeypatch):
    hold(range(1000), monkeypatch)


@pytest.mark.parametrize("parser", [None, "qwen3"])
async def test_eight_executions_of_an_agent_that_rewrites_its_thinking_are_eight_samples(monkeypatch, parser):
    """Agents leave thoughts out or shorten them, in a field of their own or in the text."""
    rng, tokenizer = random.Random(1), TOKENIZERS["qwen-thinking"]
    engine = Engine(rng, tokenizer)
    monkeypatch.setattr("slime.agent.adapters.common.engine_answer", engine)
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url="", reasoning_parser=parser)
    made = []
    for execution in range(8):
        adapter.open_session(str(execution), sampling_defaults={"max_new_tokens": 50})
        messages = [{"role": "user", "content": f"question {execution}"}]
        for number in range(4):
            turn = await adapter.turn(TurnRequest(str(execution), messages, None, {}))
            content = adapter.reply_message(turn.output)["content"].rpartition("</think>")[2].strip()
            if number % 2:
                content = f"<think>shorter</think>\n{content}"
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
        made += await adapter.finish_session(str(execution), base_sample=Sample(index=execution))
    assert len(made) == 8 and [sample.metadata["round_number"] for sample in made] == [4] * 8
    check(made, engine.records)
