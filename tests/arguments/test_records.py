"""Data that no prompt can be made of is found before anything starts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.arguments import validated_args
from slime.arguments.validate.records import tokenizer_of

USER = {"role": "user", "content": "1+1"}
ANSWER = {"role": "assistant", "content": "2"}
SFT = dict(
    rollout_function_path="slime.rollout.sft_rollout.generate_rollout",
    loss_type="sft_loss",
    disable_compute_advantages_and_returns=True,
    debug_train_only=True,
    n_samples_per_prompt=1,
    label_key=None,
    rm_type=None,
    colocate=None,
)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


GOOD = {"input": "1+1", "label": "2"}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (GOOD | {"input": ""}, "field 'input' is blank"),
        (GOOD | {"input": " \n"}, "field 'input' is blank"),
        (GOOD | {"input": 5.5}, "field 'input' is 5.5, expected text or a list of messages"),
        (GOOD | {"input": []}, "field 'input' is [], expected text or a list of messages"),
        (GOOD | {"input": ["hi"]}, "'hi' in field 'input' is not a message with a role"),
        (
            GOOD | {"input": [{"role": "user"}]},
            "{'role': 'user'} in field 'input' is not a message with content",
        ),
        (
            GOOD | {"input": [{"content": "hi"}]},
            "{'content': 'hi'} in field 'input' is not a message with a role",
        ),
        (
            GOOD | {"input": [USER]},
            "field 'input' is a list of messages (wanted: --apply-chat-template, or text)",
        ),
        (GOOD | {"label": None}, "field 'label' is null"),
        (GOOD | {"metadata": [1]}, "metadata are list, expected an object"),
        (GOOD | {"metadata": "[1]"}, "metadata are list, expected an object"),
        (GOOD | {"metadata": "{"}, "metadata are not valid JSON"),
        (GOOD | {"metadata": "[" * 100_000}, "metadata are not valid JSON"),
        (GOOD | {"metadata": {"rm_type": "maths"}}, "rm_type of its metadata maths: unknown (wanted: math"),
        (GOOD | {"metadata": {"rm_type": 5}}, "rm_type of its metadata 5: unknown (wanted: math"),
        (GOOD | {"metadata": {"rm_type": "remote_rm"}}, "rm_type of its metadata remote_rm: needs --rm-url"),
        (GOOD | {"tools": "calculator"}, "tools are not valid JSON"),
        (GOOD | {"tools": {"name": "f"}}, "tools are dict, expected a list"),
    ],
)
def test_a_bad_record_is_named_wherever_it_stands(words, refusal, data, record, said):
    write(data, GOOD, GOOD, record)
    message = refusal(words())
    assert message.startswith(f"--prompt-data: {data}:3: ")
    assert said in message
    held_out = words(eval_interval=1, eval_prompt_data=["held_out", data], prompt_data=None, num_rollout=0)
    assert refusal(held_out).startswith(f"eval dataset held_out: {data}:3: ")


@pytest.mark.parametrize("content", ["", "\n\n", "  \n"])
def test_an_empty_file_is_refused(words, refusal, data, content):
    data.write_text(content)
    assert refusal(words()) == f"--prompt-data: {data}: holds no record"


@pytest.mark.parametrize("part", ["[4:]", "[2:1]", "[:-4]"])
def test_a_slice_without_a_record_is_refused(words, refusal, data, part):
    line = words(prompt_data=f"{data}@{part}")
    assert refusal(line) == f"--prompt-data: {data}: holds no record in the slice @{part}"


def test_a_table_without_a_row_is_refused(words, refusal, tmp_path):
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"input": pa.array([], pa.string()), "label": pa.array([], pa.string())}), path)
    assert refusal(words(prompt_data=path)) == f"--prompt-data: {path}: holds no record"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }", "unexpected '}'"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ],
)
def test_a_chat_template_that_fails_is_refused(words, refusal, altered_checkpoint, data, template, said):
    path = altered_checkpoint()
    (path / "chat_template.jinja").write_text(template)
    message = refusal(words(hf_checkpoint=path, apply_chat_template=True))
    assert message.startswith(f"--prompt-data: {data}:1: the chat template fails on this prompt (")
    assert said in message


def test_a_chat_template_that_renders_nothing_is_refused(words, refusal, altered_checkpoint, data):
    path = altered_checkpoint()
    (path / "chat_template.jinja").write_text("{{ '' }}")
    message = refusal(words(hf_checkpoint=path, apply_chat_template=True))
    assert message == f"--prompt-data: {data}:1: the chat template makes nothing of this prompt"


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "image_url"),
        ({"type": None, "text": None, "video": "a.mp4"}, "video"),
    ],
)
def test_images_in_prompts_are_refused_wherever_they_stand(words, refusal, data, part, named):
    """No template could show them to a model here, and an answer to the rest is trained on as if it had."""
    looks = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    said = f"field 'input' has a part of type {named!r} (wanted: text; other inputs are not supported)"
    write(data, GOOD, GOOD | {"input": looks})
    assert refusal(words(apply_chat_template=True)) == f"--prompt-data: {data}:2: {said}"
    write(data, {"input": [USER, ANSWER]}, {"input": [*looks, ANSWER]})
    assert refusal(words(**SFT)) == f"--prompt-data: {data}:2: {said}"


PARTS = [{"type": "text", "text": "1+1", "image": None}]
WHOLE_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}
{%- endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_parts_of_text_are_for_templates_that_take_them(words, refusal, data, altered_checkpoint, kind):
    asks = {"role": "user", "content": PARTS}
    said = "the chat template takes no list of parts as content (wanted: text)"
    path = altered_checkpoint()
    imitates = words(**SFT, loss_mask_type=kind, hf_checkpoint=path)
    answers = words(apply_chat_template=True, hf_checkpoint=path)
    write(data, GOOD | {"input": [asks, ANSWER]})
    assert refusal(answers) == f"--prompt-data: {data}:1: {said}"
    named = f"--loss-mask-type {kind} fails on this conversation"
    assert refusal(imitates) == f"--prompt-data: {data}:1: {named} ({said})"
    (path / "chat_template.jinja").write_text(WHOLE_TEMPLATE)
    tokenizer_of.cache_clear()
    validated_args(answers)
    validated_args(imitates)


def test_instructions_are_looked_for_before_anything_is_scored(words, refusal, data):
    """The public data set has them beside the prompt, and not in a field of their own."""
    given = {"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 1}]}
    write(data, GOOD | {"metadata": given}, GOOD | given)
    said = (
        "its metadata have no instruction_id_list (found: nothing; --metadata-key names the field, "
        "now 'metadata'), so that ifbench cannot score an answer"
    )
    assert refusal(words(rm_type="ifbench")) == f"--prompt-data: {data}:2: {said}"
    held_out = dict(eval_interval=1, eval_prompt_data=["held_out", data], prompt_data=None, num_rollout=0)
    assert refusal(words(rm_type="boxed_ifbench", **held_out)) == f"eval dataset held_out: {data}:2: {said}"
    hooked = {"rollout_sample_hook_path": "tests.rollout.plugins.group_rm"}
    validated_args(words(rm_type="ifbench", **hooked))
    write(data, GOOD | {"metadata": given}, GOOD | {"metadata": {"rm_type": "math"}})
    validated_args(words(rm_type="ifbench"))


def test_arguments_of_the_template_are_tried(words, refusal, data):
    message = refusal(words(apply_chat_template=True, apply_chat_template_kwargs='{"tokenize": true}'))
    assert message.startswith(f"--prompt-data: {data}:1: the chat template fails on this prompt (")


def test_prompts_that_are_all_too_long_are_refused(words, refusal, data):
    write(data, *[GOOD | {"input": "x" * 9}] * 3)
    message = f"--prompt-data: {data}: no prompt of at most 8 tokens among 3 records"
    assert refusal(words(rollout_max_prompt_len=8)) == message
    write(data, *[GOOD | {"input": "x" * 9}] * 3, GOOD)
    assert validated_args(words(rollout_max_prompt_len=8, rollout_batch_size=1)).rollout_max_prompt_len == 8


def test_what_is_no_conversation_is_refused_for_sft(words, refusal, data):
    write(data, {"input": [USER, ANSWER]}, {"input": "hi"})
    said = "field 'input' is text (wanted: a list of messages; --input-key names the field)"
    assert refusal(words(**SFT)) == f"--prompt-data: {data}:2: {said}"


def test_some_conversations_may_have_no_answer_to_learn_but_not_all(words, refusal, data):
    write(data, {"input": [USER]}, {"input": [USER, ANSWER]}, {"input": [USER]})
    validated_args(words(**SFT))
    write(data, {"input": [USER]}, {"input": [USER, USER]})
    said = "no message of an assistant in field 'input' of 2 records, so there is nothing to learn"
    assert refusal(words(**SFT)) == f"--prompt-data: {data}: {said}"


def test_a_conversation_that_the_mask_cannot_be_made_of_is_refused(words, refusal, data, altered_checkpoint):
    write(data, {"input": [USER, ANSWER]})
    path = altered_checkpoint()
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    line = words(hf_checkpoint=path, **SFT, loss_mask_type="qwen3_5")
    assert "--loss-mask-type qwen3_5 fails on this conversation" in refusal(line)
    validated_args(words(**SFT))


def test_sft_renders_conversations_itself(words, refusal, notes, data):
    write(data, {"input": [USER, ANSWER]})
    line = words(**SFT, apply_chat_template=True)
    assert notes(line) == ["--apply-chat-template: has no effect, SFT renders conversations itself"]
    assert validated_args(line).apply_chat_template is False
    evaluated = SFT | {"debug_train_only": None, "colocate": True, "eval_interval": 1, "rm_type": "random"}
    evaluated["eval_prompt_data"] = ["held_out", data]
    message = refusal(words(**evaluated, apply_chat_template=True))
    assert message.startswith("--apply-chat-template: SFT renders conversations itself (wanted: without, and")


def test_a_reward_that_compares_needs_labels_unless_a_teacher_teaches(words, refusal, notes, checkpoint):
    assert refusal(words(label_key=None)) == "--rm-type math: compares with a label (wanted: --label-key)"
    validated_args(words(label_key=None, rm_type="random"))
    taught = words(label_key=None, use_opd=True, opd_type="megatron", opd_teacher_load=checkpoint)
    (line,) = notes(taught)
    assert line.startswith("--rm-type math: without --label-key every reward is 0; the teacher alone teaches")
    validated_args(words(label_key=None, rollout_sample_hook_path="tests.rollout.plugins.group_rm"))


def test_user_code_may_read_what_engines_cannot(words, data):
    write(data, GOOD | {"input": [USER], "metadata": {"rm_type": "mine"}})
    validated_args(
        words(custom_generate_function_path="tests.rollout.plugins.split_generate", rollout_batch_size=1)
    )


@pytest.mark.parametrize("own", ["rm_type: random", "metadata_overrides: {rm_type: random}"])
def test_the_type_of_an_eval_dataset_stands_in_for_that_of_its_records(words, refusal, tmp_path, own):
    held_out = write(tmp_path / "held_out.jsonl", GOOD | {"metadata": {"rm_type": "olympiad"}})
    config = tmp_path / "eval.yaml"
    dataset = f"eval: {{datasets: [{{name: a, path: {held_out}, %s}}]}}\n"
    config.write_text(dataset % own)
    validated_args(words(eval_interval=1, eval_config=config))
    config.write_text(dataset % "top_k: 5")
    assert "rm_type of its metadata olympiad: unknown" in refusal(words(eval_interval=1, eval_config=config))
