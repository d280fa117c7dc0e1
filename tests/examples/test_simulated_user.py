"""A model at a service desk: a scripted one, and a scripted customer behind the other route."""

import json
import random

import pytest
from fastapi.responses import JSONResponse

from examples.simulated_user import desk, make_data
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.types import Sample
from tests.engines.fake import HEADER, TalkingEngine

# The tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403

ROW = make_data.row_of(random.Random(3))["metadata"]
WANTED = ROW["wish"].split()[2]
NUMBER = next(number for number, thing in ROW["orders"][ROW["name"]].items() if thing == WANTED)


def call(tool, /, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def customer(body):
    """Says his name, then what he wants, then that it is enough."""
    told, *talk = body["messages"]
    name = told["content"].split()[2].rstrip(",")
    turn = sum(message["role"] == "assistant" for message in talk)
    said = [f"I am {name}.", told["content"].split("Your wish: ")[1].split(" Say")[0], desk.STOP][turn]
    return {"choices": [{"message": {"role": "assistant", "content": said}}]}


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer)
    engine.answers["v1/chat/completions"] = customer
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def serve(engine, make_args):
    """An episode in which the model says these."""

    async def run(*says):
        engine.answer = lambda conversation: says[conversation.count(HEADER)]
        sample = Sample(prompt="", metadata=dict(ROW), index=0, group_index=0)
        return await desk.generate(make_args(), sample, {"max_new_tokens": 400})

    return run


async def test_whoever_listens_looks_up_and_cancels_is_rewarded(serve, engine):
    look = call("orders_of", name=ROW["name"])
    sample = await serve("What do you want?", look, call("cancel", order=NUMBER), "Done.")
    assert (sample.reward, sample.status) == (1.0, Sample.Status.COMPLETED)
    assert json.dumps(ROW["orders"][ROW["name"]]) in sample.response and "cancelled" in sample.response
    heard = [message["content"] for message in engine.seen("v1/chat/completions")[-1]["messages"]]
    assert heard[1::2] == [desk.GREETING, "What do you want?", "Done."]
    assert not any("orders_of" in text for text in heard)


@pytest.mark.parametrize("order", [None, "1", "another's"])
async def test_another_state_of_the_orders_earns_nothing(serve, order):
    other = next(number for name, owned in ROW["orders"].items() for number in owned if name != ROW["name"])
    first = call("cancel", order=other if order == "another's" else order)
    sample = await serve(first, "What?", "Done.")
    assert sample.reward == 0.0 and sample.status is Sample.Status.COMPLETED
    assert ("no such order" in sample.response) == (order != "another's")


async def test_a_customer_who_cannot_be_asked_is_no_reward(serve, engine):
    engine.answers["v1/chat/completions"] = JSONResponse({"error": "gone"}, status_code=400)
    sample = await serve("What?")
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, None)


async def test_a_rollout_serves_many_customers(engine, make_args, make_source, tmp_path):
    make_data.main(["--output", str(tmp_path / "customers.jsonl"), "--rows", "3"])
    args = make_args(
        prompt_data=str(tmp_path / "customers.jsonl"),
        label_key=None,
        apply_chat_template=False,
        custom_generate_function_path="examples.simulated_user.desk.generate",
        custom_rm_path=None,
        rollout_max_response_len=400,
    )

    def answer(conversation):
        name = conversation.split("I am ")[1].split(".")[0]
        if conversation.count(HEADER) < 2:
            return ("What do you want?", call("orders_of", name=name))[conversation.count(HEADER)]
        wanted = conversation.split("cancel the ")[1].split()[0]
        orders = json.loads(conversation.split("<tool_response>")[1].split("</tool_response>")[0])
        number = next(number for number, thing in orders.items() if thing == wanted)
        return "Done." if "cancelled" in conversation else call("cancel", order=number)

    engine.answer = answer
    output = await generate_rollout_async(args, 0, make_source(args))
    assert [sample.reward for group in output.samples for sample in group] == [1.0] * 6


def test_what_is_left_is_all_but_what_is_wanted():
    for seed in range(20):
        row = make_data.row_of(random.Random(seed))["metadata"]
        pairs = {(who, number) for who, owned in row["orders"].items() for number in owned}
        left = {(who, number) for who, owned in row["left"].items() for number in owned}
        ((who, number),) = pairs - left
        assert len(pairs) == 4 and who == row["name"] and row["orders"][who][number] in row["wish"]
