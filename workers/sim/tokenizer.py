"""A tokenizer without a vocabulary file: token 17 is the text "<17>"."""

import re
from collections.abc import Iterable
from typing import Any

_TOKEN = re.compile(r"<(\d+)>")


class SimVocabulary:
    """A stand-in for a Hugging Face tokenizer.

    Text that is not of the form "<17>" becomes one token a UTF-8 byte, so that any prompt can be encoded.
    Such text decodes to the numbers of its bytes.
    """

    def __init__(self, *, vocab_size: int, eos_token_id: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002
        """Token ids of a text; no token is added at the front or the end."""
        del add_special_tokens
        tokens: list[int] = []
        end = 0
        for match in _TOKEN.finditer(text):
            tokens += text[end : match.start()].encode()
            tokens.append(int(match[1]))
            end = match.end()
        return tokens + list(text[end:].encode())

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:  # noqa: FBT001, FBT002
        """Text of token ids; end-of-text is the one special token."""
        return "".join(
            f"<{token}>"
            for token in token_ids
            if not (skip_special_tokens and token == self.eos_token_id)
        )


class SimTokenizer:
    """`llm.tokenizer`: a double of TensorRT-LLM's wrapper, with the wrapped one in `tokenizer`."""

    def __init__(self, tokenizer: SimVocabulary) -> None:
        self.tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int:
        """The end-of-text token."""
        return self.tokenizer.eos_token_id

    def encode(self, text: str, **options: Any) -> list[int]:
        """Token ids of a text; `options` are those of the wrapped tokenizer."""
        return self.tokenizer.encode(text, **options)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens)
