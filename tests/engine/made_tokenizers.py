"""Small tokenizers trained on the spot, of the two kinds that Llama-shaped models have."""

from __future__ import annotations

import json

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Grüße aus München! 東京は日本の首都です。 👩‍👩‍👧 naïve café",
    "def add(a, b):\n    return a + b  # 3.14\n",
    "the the the dog dog fox fox over over",
] * 3


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>", "<|stop|>", "<|quit|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("<äö>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>", add_bos_token=True
    )


def sentencepiece_tokenizer() -> LlamaTokenizer:
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, limit_alphabet=40, initial_alphabet=["▁"], show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    model = json.loads(fast.to_str())["model"]
    return LlamaTokenizer(
        vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]], add_bos_token=True, pad_token="</s>"
    )
