"""From text to token ids and back, piece by piece: tokenizers, chat templates, stop strings."""

from splitwise.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from splitwise.text.stops import StopMatcher, StopResult
from splitwise.text.vocabulary import (
    ByteVocabulary,
    ChatTemplateError,
    TokenizerVocabulary,
    Vocabulary,
    load_vocabulary,
)

__all__ = [
    "ByteLevelDetokenizer",
    "ByteVocabulary",
    "ChatTemplateError",
    "Detokenizer",
    "StopMatcher",
    "StopResult",
    "TokenizerVocabulary",
    "Vocabulary",
    "WindowDetokenizer",
    "load_vocabulary",
]
