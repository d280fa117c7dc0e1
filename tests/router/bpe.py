"""Tiny tokenizers, under which one text has many tokenizations."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = ["the", "then", " the", "low", "lower", "lowest", " newer", "wide", "héllo", "日本", "🙂", "\n\n"]


@cache
def byte_level(vocabulary: int = 330) -> PreTrainedTokenizerFast:
    """A BPE whose merges make one text tokenizable in many ways."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4 + WORDS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    """Makes a tokenizer that is not byte-level: spaces are a letter of the vocabulary (Metaspace)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["the lower the newer", "then lowest wide"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
