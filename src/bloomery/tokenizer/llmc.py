"""
Tokenizers in the file of llm.c, which can decode and nothing else.

    256 int32      20240328, version, number of tokens, the token at the end of a text (version 1: 50256); in the four
                   after, which llm.c leaves empty, how words are cut: the letters of a name in PATTERNS, as bytes
    each token     one byte for its length, then its bytes
"""

import json
import struct
from pathlib import Path
from typing import get_args

from tokenizers.models import BPE

from bloomery.core.errors import DataError
from bloomery.core.files import whole_file
from bloomery.tokenizer.patterns import PatternName
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.tokenizer.train import byte_level

MAGIC, VERSION = 20240328, 2
GPT2_END = 50256
HEADER = struct.Struct("<4i16s992x")


def write(file: Path, tokenizer: Tokenizer) -> None:
    """Write what each id stands for; special tokens by their names. Raises DataError for a token of over 255 bytes."""
    names = {token["id"]: token["content"].encode() for token in tokenizer.spec["added_tokens"] if token["special"]}
    tokens = [names.get(id) or tokenizer.decode_bytes([id]) for id in range(tokenizer.vocab_size)]
    if long := next((id for id, token in enumerate(tokens) if len(token) > 255), None):
        what = f"token {long} has {len(tokens[long])} bytes, and llm.c has one byte for a length"
        raise DataError(what, where=str(file), cure="Export for another program, or use another tokenizer.")
    with whole_file(file) as opened:
        cut = (_cut(tokenizer) or "").encode()
        opened.write(HEADER.pack(MAGIC, VERSION, len(tokens), tokenizer.document_id, cut))
        for token in tokens:
            opened.write(bytes([len(token)]) + token)


def _cut(tokenizer: Tokenizer) -> PatternName | None:
    """The pattern of a tokenizer that cuts words by it and does nothing else to a text; None for another."""
    if tokenizer.spec["normalizer"] is not None:
        return None
    how = {name: json.loads(byte_level(BPE(), name).to_str())["pre_tokenizer"] for name in get_args(PatternName)}
    return next((name for name, cut in how.items() if cut == tokenizer.spec["pre_tokenizer"]), None)


def pattern(file: Path) -> PatternName | None:
    """How words are cut, where a file that `read` can read says it."""
    with file.open("rb") as opened:
        said = HEADER.unpack(opened.read(HEADER.size))[4].rstrip(b"\0")
    return next((name for name in get_args(PatternName) if name.encode() == said), None)


def read(file: Path) -> tuple[list[bytes], int]:
    """The bytes of each id, and the id at the end of a text. Raises DataError, which names the file."""
    data = file.read_bytes()
    if len(data) < HEADER.size:
        raise DataError(f"has {len(data)} bytes, less than a header of {HEADER.size}", where=str(file), cure=_AGAIN)
    magic, version, count, end, _ = HEADER.unpack_from(data)
    if magic != MAGIC or version not in (1, VERSION):
        cure = f"Known are {MAGIC}/1 and {MAGIC}/{VERSION}."
        raise DataError(
            f"begins with {magic} and {version}, which is no tokenizer of llm.c", where=str(file), cure=cure
        )
    tokens: list[bytes] = []
    place = HEADER.size
    while len(tokens) < count and place < len(data):
        length = data[place]
        tokens.append(data[place + 1 : place + 1 + length])
        place += 1 + length
    if len(tokens) != count or place != len(data):
        raise DataError(f"its {count} tokens do not fill its {len(data)} bytes", where=str(file), cure=_AGAIN)
    end = GPT2_END if version == 1 else end
    if not 0 <= end < count:
        raise DataError(f"says that {end} of its {count} tokens ends a text", where=str(file), cure=_AGAIN)
    return tokens, end


_AGAIN = "It is damaged. Make it or fetch it again."
