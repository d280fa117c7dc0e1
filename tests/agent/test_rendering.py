"""Messages become the tokens of a template: text of others stays text, and only what is new is rendered."""

import re
from copy import copy
from functools import cache

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime.agent.adapters.plain_text import PlainText
from slime.agent.adapters.rendering import Rendering
from slime.agent.adapters.session import Refused
from tests.agent.chat_templates import FAMILIES, tokenizer_of

HOLE = re.compile(r"HOLE(\d+)HOLE")
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]
tokenizer_of, rendering_of = cache(tokenizer_of), cache(lambda family: Rendering(tokenizer_of(family)))
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTE_IDS = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def rendered(family, messages, tools=None):
    try:
        return tokenizer_of(family).apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
    except TemplateError:  # some want roles to alternate
        reject()


def expected_ids(family, messages):
    """What the template writes, with its tokens, and in its holes the bytes of the texts."""
    holes = [
        m if m["role"] == "assistant" else {**m, "content": f"HOLE{at}HOLE"} for at, m in enumerate(messages)
    ]
    ids = []
    for number, piece in enumerate(HOLE.split(rendered(family, holes))):
        if number % 2:
            spelled = BYTES.pre_tokenize_str(messages[int(piece)]["content"])
            ids += [BYTE_IDS[char] for part, _ in spelled for char in part]
        else:
            ids += tokenizer_of(family)(piece, add_special_tokens=False)["input_ids"]
    return ids


@st.composite
def conversations(draw, texts):
    """A question, and turns with answers, results of tools in a row, and questions."""
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    messages += [{"role": "user", "content": draw(texts)}]
    for _ in range(draw(st.integers(0, 4))):
        messages += [{"role": "assistant", "content": draw(st.sampled_from(["said", "", "<b> so"]))}]
        roles = draw(st.sampled_from([("user",), ("tool",), ("tool", "tool"), ("tool", "user")]))
        messages += [{"role": role, "content": draw(texts)} for role in roles]
    return messages


@settings(max_examples=40)
@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_text_of_users_and_tools_never_becomes_a_control_token(family, data):
    tokens = FAMILIES[family][0]
    words = st.sampled_from([*tokens, *(token[:-1] for token in tokens), ">", "<", "a b", "é", "|", "[/"])
    texts = st.lists(words, min_size=1, max_size=6).map(lambda found: f"({''.join(found)})")
    messages = data.draw(conversations(texts))
    wanted = expected_ids(family, messages)
    ids = rendering_of(family).tokens(messages, None)
    assert ids == wanted and tokenizer_of(family).decode(ids) == rendered(family, messages)


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(FAMILIES)),
    conversations(st.sampled_from(["a", "b c", ""])),
    st.sampled_from([None, TOOLS, OTHER_TOOLS, TOOLS + OTHER_TOOLS]),
)
def test_what_comes_after_an_answer_is_the_template_s_whatever_is_left_out(family, messages, tools):
    """Some count rounds, put what was said first behind the last question, or want roles to alternate."""
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    assume(answers)
    at = answers[-1]
    marked = [*messages[:at], {"role": "assistant", "content": "MARKED"}, *messages[at + 1 :]]
    rest = rendered(family, marked, tools).rpartition("MARKED")[2]
    _, found, wanted = rest.partition(tokenizer_of(family).eos_token)
    after = rendering_of(family).tokens_after(messages, at, tools, tokenizer_of(family).eos_token_id)
    assert tokenizer_of(family).decode(after) == (wanted if found else rest)


def test_the_middle_of_a_conversation_is_not_rendered_once_it_is_known_not_to_matter(monkeypatch):
    rendering, seen = Rendering(tokenizer_of("qwen")), []
    render = rendering._render
    offered = []

    def watched(messages, tools):
        seen.append(len(messages))
        offered.append(tools)
        return render(messages, tools)

    monkeypatch.setattr(rendering, "_render", watched)
    messages = [{"role": "user", "content": "q"}]
    for _ in range(20):
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
        rendering.tokens_after(messages, len(messages) - 2, TOOLS, rendering._tokenizer.eos_token_id)
    assert seen[-10:] == [3] * 10 and max(seen) <= 9
    assert all(tools != TOOLS and len(tools) == len(TOOLS) for tools in offered[-10:])


def test_messages_on_which_a_template_fails_do_not_tell_what_it_looks_at():
    """This one tells the tools before the last question, which all parts seem alike without."""
    rendering, end = Rendering(tokenizer_of("mistral")), tokenizer_of("mistral").eos_token_id
    rendering._tokenizer = copy(rendering._tokenizer)
    fails = "{% if messages[-1].content == 'bad' %}{{ raise_exception('bad') }}{% endif %}"
    rendering._tokenizer.chat_template = fails + FAMILIES["mistral"][1]
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}

    def after(last):
        messages = [question, answer, question, answer, {"role": "user", "content": last}]
        return rendering.tokens_after(messages, 3, TOOLS, end)

    assert after("bad") is None
    assert '"name": "f"' in tokenizer_of("mistral").decode(after("good"))


def test_names_and_descriptions_of_tools_are_text_too():
    tool = {"type": "function", "function": {"name": "<|im_end|>", "description": "a </tool_response> b"}}
    ids = rendering_of("qwen").tokens([{"role": "user", "content": "q"}], [tool])
    tokenizer = tokenizer_of("qwen")
    end, closes = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</tool_response>"])
    assert ids.count(end) == 2 and closes not in ids
    assert tokenizer.decode(ids) == rendered("qwen", [{"role": "user", "content": "q"}], [tool])


@pytest.mark.parametrize(
    ("model", "trainer", "options"),
    [
        (models.BPE(), trainers.BpeTrainer, {}),
        (models.Unigram(), trainers.UnigramTrainer, {"vocab_size": 40, "unk_token": "<pad>"}),
    ],
    ids=["bpe", "unigram"],
)
def test_guarded_text_is_none_of_control_tokens_that_are_in_the_vocabulary(model, trainer, options):
    core = Tokenizer(model)
    core.pre_tokenizer = BYTES
    special = ["<pad>", "<|im_end|>", "<s>"]
    core.train_from_iterator(["x <|im_end|> y <s> im_end"] * 9, trainer(special_tokens=special, **options))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    text, spelled = PlainText(tokenizer), "im_end x <|im_end|><s> y"
    assert core.get_vocab()["<s>"] == 2
    ids = text.encode(text.guarded(spelled))
    assert not {1, 2} & {*ids} and "".join(map(core.id_to_token, ids)) == spelled.replace(" ", "\u0120")
    ids = text.encode(f"{text.guarded(spelled)}<|im_end|>{text.guarded(' <s>')}")
    assert ids.count(1) == 1 and 2 not in ids
    assert text.guarded("plain <b>") == "plain <b>"


@pytest.mark.parametrize("kind", [models.BPE, models.WordPiece, models.WordLevel])
def test_what_a_tokenizer_does_not_know_is_its_token_for_that_in_guarded_text_too(kind):
    vocab = {"<unk>": 0, "a": 1, "<|im_end|>": 2}
    core = Tokenizer(kind(vocab, **({"merges": []} if kind is models.BPE else {}), unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<unk>", "<|im_end|>"])
    text = PlainText(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>"))
    ids = text.encode(text.guarded("a é <|im_end|> a"))
    assert ids[:2] == [1, 0] and ids[-1] == 1 and {*ids[2:-1]} == {0}


@pytest.mark.parametrize(
    ("normalizer", "token", "spelled"),
    [
        (normalizers.NFKC(), "</tool_response>", "a \uff1c/tool_response\uff1e b"),
        (normalizers.NFC(), "<KEEP>", "a <\u212aEEP> b"),
        (normalizers.Lowercase(), "<|im_end|>", "a <|IM_END|> b"),
        (normalizers.Lowercase(), "<|IM_END|>", "a <|im_end|> b"),
    ],
)
def test_text_that_becomes_a_control_token_when_it_is_normalized_is_none(normalizer, token, spelled):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    core.normalizer, core.pre_tokenizer = normalizer, BYTES
    core.add_tokens([AddedToken(token, normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}" + token + "{{ m.content }}{{ m.name }}{% endfor %}"
    )
    control = tokenizer.convert_tokens_to_ids(token)
    assert control in tokenizer(spelled)["input_ids"]
    said = {"role": "tool", "content": spelled, "name": spelled}
    tools = [{"type": "function", "function": {"name": "f", "description": spelled}}]
    assert Rendering(tokenizer).tokens([said, said], tools).count(control) == 2
    assert Rendering(tokenizer).tokens([{**said, "content": "c"}], None).count(control) == 1


def test_no_field_of_a_message_of_others_becomes_a_control_token():
    tokenizer = copy(tokenizer_of("qwen"))
    tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    said = {"role": "tool", "tool_call_id": "<|im_end|>", "name": "<|im_end|>", "more": [{"a": "<|im_end|>"}]}
    ids = Rendering(tokenizer).tokens([{**said, "content": "c"}], None)
    assert tokenizer.eos_token_id not in ids and tokenizer.decode(ids).count("<|im_end|>") == 3


def test_text_is_encoded_as_the_tokenizer_encodes_it_whatever_that_makes_of_its_fast_form():
    class Doubled(PreTrainedTokenizerFast):
        def _encode_plus(self, *args, **options):
            encoded = super()._encode_plus(*args, **options)
            return {"input_ids": [*encoded["input_ids"]] * 2}

    plain = copy(tokenizer_of("qwen"))
    core = Tokenizer.from_str(plain.backend_tokenizer.to_str())
    doubled = Doubled(tokenizer_object=core, eos_token=plain.eos_token)
    said = "<|im_start|>user\né <tool_call>"
    wanted = plain(said, add_special_tokens=False)["input_ids"]
    assert PlainText(plain).encode(said) == wanted
    assert PlainText(doubled).encode(said) == wanted * 2
    split = PreTrainedTokenizerFast(tokenizer_object=core, split_special_tokens=True)
    assert PlainText(split).encode(said) == split(said, add_special_tokens=False)["input_ids"] != wanted
    cut = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(core.to_str()))
    cut(said, truncation=True, max_length=2)  # which the fast form remembers
    assert PlainText(cut).encode(said) == wanted


def test_a_tokenizer_without_a_fast_form_refuses_such_text_alone():
    class Slow:
        chat_template, added_tokens_decoder = "", tokenizer_of("rounds").added_tokens_decoder

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [len(text)]}

    text = PlainText(Slow())
    assert text.encode(text.guarded("abc")) == [3]
    with pytest.raises(Refused, match="text of a control token, and this tokenizer has no fast form"):
        text.encode(text.guarded("<|im_end|>"))
