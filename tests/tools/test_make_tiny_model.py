import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import enable_progress_bar

from tools import make_tiny_model

CONVERSATION = [
    {"role": "user", "content": "12*34 é中"},
    {"role": "assistant", "content": "<tool_call>12*34</tool_call>"},
    {"role": "tool", "content": "408"},
    {"role": "assistant", "content": "\\boxed{408}"},
]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_checkpoint_loads_through_the_auto_classes(family, tmp_path):
    make_tiny_model.main(["--output", str(tmp_path), "--family", family, "--num-layers", "1"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == family
    assert model.config.eos_token_id == tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), 320)


def test_default_is_the_half_million_parameter_qwen3():
    tokenizer = make_tiny_model.make_tokenizer()
    model = make_tiny_model.make_model(make_tiny_model.make_config(tokenizer))
    assert sum(parameter.numel() for parameter in model.parameters()) == 484_416
    assert len(tokenizer) == 270


def test_weights_depend_on_the_seed_alone():
    tokenizer = make_tiny_model.make_tokenizer()
    config = make_tiny_model.make_config(tokenizer, num_layers=1)
    one, same, other = (make_tiny_model.make_model(config, seed=seed).state_dict() for seed in (1, 1, 2))
    name = "model.embed_tokens.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_words_survive_decoding_without_special_tokens_and_cost_one_id_each():
    tokenizer = make_tiny_model.make_tokenizer()
    ids = tokenizer("\\boxed{7}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\\boxed{7}"


def test_a_qwen2_head_size_that_the_format_cannot_express_is_refused():
    tokenizer = make_tiny_model.make_tokenizer()
    with pytest.raises(ValueError, match="hidden_size / heads = 32"):
        make_tiny_model.make_config(tokenizer, "qwen2", head_dim=16)


def test_nothing_but_a_line_about_the_model_is_said(tmp_path, capfd):
    enable_progress_bar()
    make_tiny_model.main(["--output", str(tmp_path), "--num-layers", "1"])
    said = capfd.readouterr()
    assert re.fullmatch(rf"{tmp_path}: qwen3, [\d,]+ parameters, 270 tokens\n", said.out)
    assert said.err == ""
