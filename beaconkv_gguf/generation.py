"""What commands need around ``Llama.generate``: chat templates, and going on past the end."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter


def prompt_tokens(llm: llama_cpp.Llama, prompt: str, raw: bool = False) -> list[int]:
    """Token ids of a prompt, in the model's chat template where it has one and not `raw`."""
    template = None if raw else llm.metadata.get("tokenizer.chat_template")
    if template is None:
        return llm.tokenize(prompt.encode(), special=True)
    formatter = Jinja2ChatFormatter(
        template=template,
        eos_token=_token_text(llm, llm.token_eos()),
        bos_token=_token_text(llm, llm.token_bos()),
    )
    result = formatter(messages=[{"role": "user", "content": prompt}])
    return llm.tokenize(result.prompt.encode(), add_bos=not result.added_special, special=True)


def end_tokens(llm: llama_cpp.Llama) -> list[int]:
    """Tokens that end a text or a turn."""
    vocab = llm._model.vocab
    return [t for t in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, t)]


def never_end(llm: llama_cpp.Llama) -> llama_cpp.LogitsProcessorList:
    """Logits processors that let no text end."""
    ends = end_tokens(llm)

    def process(input_ids: Any, scores: Any) -> Any:
        scores[ends] = -np.inf
        return scores

    return llama_cpp.LogitsProcessorList([process])


def _token_text(llm: llama_cpp.Llama, token: int) -> str:
    return llm._model.token_get_text(token) if token != -1 else ""
