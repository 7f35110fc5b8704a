"""Text that names special tokens (`<|im_end|>`) stays text: no document and no prompt writes a model's control tokens
unless it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MARK = "sparsekvmarksthetexthere"


def as_text(tokenizer: Any, special_tokens: bool = False) -> dict[str, Any]:
    """Keywords of a tokenizer's call under which text is text; none where special_tokens are to be read as such."""
    from transformers import PreTrainedTokenizerBase

    return {} if special_tokens or not isinstance(tokenizer, PreTrainedTokenizerBase) else {
        "split_special_tokens": True}


def names_special(tokenizer: Any, text: str) -> bool:
    """Return whether the text has the text of a special token."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(t) for t in added if t.special} | set(getattr(tokenizer, "all_special_tokens", ()))
    return any(name and name in text for name in names)


def around(render: Callable[[str], str], text: str) -> tuple[str, str, str] | None:
    """Return what a chat template writes before the text, the text in its words (it may strip it), and what comes
    after; None where it changes the text otherwise. render: the template, of one message."""
    before, mark, after = render(MARK).partition(MARK)
    whole = render(text)
    if not mark or MARK in after or not (whole.startswith(before) and whole.endswith(after)):
        return None
    middle = whole[len(before):len(whole) - len(after)]
    return (before, middle, after) if middle.strip() == text.strip() else None


def chat_ids(tokenizer: Any, parts: tuple[str, str, str]) -> list[int]:
    """Token ids of a message in a template, the special tokens of which are the template's alone."""
    before, middle, after = (tokenizer(part, add_special_tokens=False, **as_text(tokenizer, part is not parts[1]))
                             ["input_ids"] for part in parts)
    return [*before, *middle, *after]
