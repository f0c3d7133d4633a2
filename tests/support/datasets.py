"""Datasets that the scripts in dev/data make, and the tokenizers that they make them with."""

import contextlib
import io
import sys
from pathlib import Path
from types import ModuleType

from llmc.data.hf_tokenizer import byte_letters

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOT = 256  # of the tokenizer of bytes


def printed(script: ModuleType, *args) -> str:
    """What a script prints. It runs in this process."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [script.__file__, *map(str, args)])
        script.main()
    return out.getvalue()


def texts_of(tokens: np.ndarray) -> list[str]:
    """Takes tokens of bytes apart into texts. The end-of-text token stands before each text."""
    assert tokens[0] == EOT
    texts = np.split(tokens, np.flatnonzero(tokens == EOT)[1:])
    return [bytes(text.astype(np.uint8)[1:]).decode() for text in texts]


def contents(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def byte_level(*special, alphabet: int = 256) -> Tokenizer:
    """The library's tokenizer of bytes, or of the first bytes alone, and these special tokens."""
    library = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(byte_letters()[:alphabet])}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(list(special))
    return library
