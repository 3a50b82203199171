"""Small real tokenizers, trained on the spot: byte-level, and SentencePiece-like with byte fallback."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# Other characters stay single bytes.
TEXTS = ["the cat sat on the mat", "a family", "accents", "stop ab abc"]


@cache
def byte_level() -> Tokenizer:
    """Return a BPE in which every token is a run of bytes, as in GPT-2 and SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Return a BPE with ▁ for spaces and byte tokens for the rest, as in Llama 2."""
    words = ["▁", *"abcdehilnorstw", "▁t", "he", "▁the", "▁s", "at"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + index for index, word in enumerate(dict.fromkeys(words))}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "s"), ("a", "t")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token=None))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
