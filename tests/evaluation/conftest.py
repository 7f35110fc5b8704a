"""The evaluation's tests use the runtime's tiny models, and a tokenizer of single characters."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))


@pytest.fixture(scope="session")
def tokenizer():
    from tiny import VOCAB
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "\n", *(chr(c) for c in range(32, 32 + VOCAB - 3)), "<end>"]
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory, tokenizer):
    """Folder of the tiny model with its tokenizer."""
    from tiny import make_model

    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
