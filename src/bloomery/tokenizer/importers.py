"""
Imports existing tokenizers with their token IDs: tokenizer.json, tiktoken, llm.c and more.

The formats are tokenizer.json, tiktoken, GPT-2, SentencePiece and llm.c.

Special tokens that chats need and the tokenizer lacks (`SPECIAL` in tokenizer/tokenizer.py) get the token IDs after
the imported ones. Imported special tokens keep their token IDs, but no text becomes a special token any more. A
tokenizer that cannot be read with the same token IDs is refused, with the reason.

SentencePiece joins the two neighbors whose joined text is the piece of the highest score, the leftmost of equals. Here
that becomes a list of merges. For every piece, best score first, it holds each pair of pieces that the piece splits
into. A text is one word, its spaces are written as U+2581, and a character without a piece becomes its bytes. A
`.model` is a protocol buffer (sentencepiece_model.proto). The few fields that matter are read without the package.

A tokenizer in the file of llm.c can decode and nothing else:

    256 int32      20240328, version, number of tokens, the token at the end of a text (version 1: 50256); in the four
                   after, which llm.c leaves empty, how words are split: the letters of a name in PATTERNS, as bytes
    each token     one byte for its length, then its bytes
"""

import base64
import binascii
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypeVar, get_args

import tokenizers
from pydantic import Field
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from typing_extensions import TypedDict

from bloomery.core.errors import DataError, UnreachableError, shorten
from bloomery.core.io import check_regular, whole_file
from bloomery.core.log import info
from bloomery.core.records import read_record
from bloomery.tokenizer.chat_template import EVERY_SPECIAL
from bloomery.tokenizer.tokenizer import (
    DOCUMENT,
    FILE,
    PATTERNS,
    SPACE,
    SPECIAL,
    PatternName,
    Tokenizer,
    byte_letters,
    byte_level,
    parsed,
    problem_of_ids,
)

T = TypeVar("T")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MAGIC, VERSION = 20240328, 2
GPT2_END = 50256
HEADER = struct.Struct("<4i16s992x")

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
BPE_KIND = 2
PARTS, PIECE = {1: bytes, 2: bytes, 3: bytes}, {1: bytes, 2: bytes, 3: int}
TRAINER, NORMALIZER = {3: int, 35: int}, {2: bytes, 3: int, 4: int}
"""Types of the fields that are read of a model, of a piece, and of its settings, by number."""
MOST_VARINT_BYTES = 10
"""Of 64 bits, 7 in a byte."""


class SentencePieceToken(NamedTuple):
    text: str
    score: float
    type: int


class SentencePieceModel(NamedTuple):
    pieces: list[SentencePieceToken]
    kind: int
    """1 unigram, 2 BPE, 3 words, 4 characters."""
    charsmap: bytes
    """The table of a normalization; empty for none."""
    puts_space_first: bool
    squeezes_space: bool
    byte_fallback: bool
    spaces_every_part: bool = False
    """Whether a space comes before each part of a text that a special token ends, as in llama.cpp."""


def write(file: Path, tokenizer: Tokenizer) -> None:
    """Write what each id stands for; special tokens by their names. Raises DataError for a token of over 255 bytes."""
    names = {token["id"]: token["content"].encode() for token in tokenizer.outline["added_tokens"] if token["special"]}
    tokens = [names.get(id) or tokenizer.decode_bytes([id]) for id in range(tokenizer.vocab_size)]
    if long := next((id for id, token in enumerate(tokens) if len(token) > 255), None):
        what = f"token {long} has {len(tokens[long])} bytes; llm.c allows at most 255"
        raise DataError(what, where=str(file), hint="Use another export format, or another tokenizer.")
    with whole_file(file) as opened:
        cut = (_cut(tokenizer) or "").encode()
        opened.write(HEADER.pack(MAGIC, VERSION, len(tokens), tokenizer.document_id, cut))
        for token in tokens:
            opened.write(bytes([len(token)]) + token)


def _cut(tokenizer: Tokenizer) -> PatternName | None:
    """The pattern of a tokenizer that cuts words by it and does nothing else to a text; None for another."""
    if tokenizer.outline["normalizer"] is not None:
        return None
    how = {name: json.loads(byte_level(BPE(), name).to_str())["pre_tokenizer"] for name in get_args(PatternName)}
    return next((name for name, cut in how.items() if cut == tokenizer.outline["pre_tokenizer"]), None)


def pattern_of(file: Path) -> PatternName | None:
    """How words are cut, where a file that `read` can read says it."""
    with file.open("rb") as opened:
        said = HEADER.unpack(opened.read(HEADER.size))[4].rstrip(b"\0")
    return next((name for name in get_args(PatternName) if name.encode() == said), None)


def read(file: Path) -> tuple[list[bytes], int]:
    """The bytes of each id, and the id at the end of a text. Raises DataError, which names the file."""
    data = file.read_bytes()
    if len(data) < HEADER.size:
        raise DataError(f"has {len(data)} bytes, less than a header of {HEADER.size}", where=str(file), hint=_AGAIN)
    magic, version, count, end, _ = HEADER.unpack_from(data)
    if magic != MAGIC or version not in (1, VERSION):
        hint = f"Use a file with the header {MAGIC}/1 or {MAGIC}/{VERSION}."
        raise DataError(
            f"begins with {magic} and {version}, which is not an llm.c tokenizer", where=str(file), hint=hint
        )
    tokens: list[bytes] = []
    offset = HEADER.size
    while len(tokens) < count and offset < len(data):
        length = data[offset]
        tokens.append(data[offset + 1 : offset + 1 + length])
        offset += 1 + length
    if len(tokens) != count or offset != len(data):
        raise DataError(f"its {count} tokens do not fill its {len(data)} bytes", where=str(file), hint=_AGAIN)
    end = GPT2_END if version == 1 else end
    if not 0 <= end < count:
        raise DataError(f"names token {end} as the end of text, but has {count} tokens", where=str(file), hint=_AGAIN)
    return tokens, end


_AGAIN = "The file is damaged. Create or download it again."


GPT2 = ("vocab.bpe", "encoder.json")
HUGGING_FACE_GPT2 = ("merges.txt", "vocab.json")
"""The same two files under the names that they have on the hub."""
SENTENCEPIECE = "tokenizer.model"
IN_FOLDERS = (FILE, GPT2[1], HUGGING_FACE_GPT2[1], SENTENCEPIECE)
"""Files of which a folder with a tokenizer has one."""
GPT2_SIZE = 50_257
"""Of a file of llm.c that has so many tokens, it is known how words are cut."""


def files(path: Path) -> tuple[Path, ...]:
    """The files that `load` reads. Raises DataError where there is nothing that it could read."""
    path = path.expanduser()
    if os.path.exists(path) and not os.path.isdir(path):
        check_regular(path)
        return (path,)
    for names in ((FILE,), GPT2, HUGGING_FACE_GPT2, (SENTENCEPIECE,)):
        if all(os.path.isfile(path / name) for name in names):
            return tuple(path / name for name in names)
    hint = f"Use {FILE}, a .tiktoken, .model or .bin file, or a folder with {' and '.join(GPT2)}."
    raise UnreachableError("there is no tokenizer", where=str(path), hint=hint)


def load(path: Path, pattern: PatternName | None = None, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """The tokenizer of a file or folder, by the end of its name. Raises DataError, which says why it cannot be read."""
    return load_with_added(path, pattern, special)[0]


def load_with_added(
    path: Path, pattern: PatternName | None = None, special: Sequence[str] = SPECIAL
) -> tuple[Tokenizer, dict[str, int]]:
    """As `load`, with the special tokens that were missing and the token IDs that they got."""
    paths = files(path)
    if pattern is not None and paths[0].suffix not in (".tiktoken", ".bin"):
        hint = "Remove tokenizer.pattern: it is only for .tiktoken and .bin files."
        raise DataError("has its own rule to split words", where=str(paths[0]), hint=hint)
    inner = _read(paths, pattern)
    before = inner.get_vocab(with_added_tokens=True)
    tokenizer = with_special(inner, str(path), special)
    ids = {name: tokenizer.special_id(name) for name in special if name not in before}
    return tokenizer, {name: id for name, id in ids.items() if id is not None}


def _read(paths: Sequence[Path], pattern: PatternName | None = None, *, foreign: bool = False) -> tokenizers.Tokenizer:
    """What a file, or GPT-2's two, hold. `foreign`: as they are, also with bytes missing."""
    kind = paths[0].suffix
    try:
        if kind == ".tiktoken":
            return _tiktoken(paths[0], pattern)
        if kind == ".bin":
            return _read_llmc(paths[0], pattern)
        if kind == ".model":
            return read_sentencepiece(paths[0].read_bytes(), str(paths[0]), foreign=foreign)
        if len(paths) == 2:
            return _gpt2(*paths)
        return _json(paths[0].read_text(encoding="utf-8"), str(paths[0]), foreign=foreign)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        hint = "The file is damaged or of another kind. Download it again, or use another tokenizer."
        raise DataError(f"cannot be read as a tokenizer: {error}", where=str(paths[0]), hint=hint) from None


TOKENIZER_CONFIG, SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
ROLE_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_foreign(
    path: Path, roles: Mapping[str, str | None] | None = None, boundary_ids: Sequence[int] = ()
) -> Tokenizer:
    """
    The tokenizer of another model, from its folder or file: no token is added, and special tokens keep their IDs.

    `roles` go before what the folder says. `boundary_ids` begin or end a text where no role does. Raises DataError,
    which says why it cannot be read.
    """
    paths = files(path)
    inner = _read(paths, foreign=True)
    roles = {**roles_of(path), **(roles or {})}
    if path.is_dir():
        _add_listed(inner, path, roles, keeps_ids=paths[0].name == FILE)
        if paths[0].name != FILE:
            _complete(inner, path, roles)
    return _foreign(inner, str(paths[0]), roles, boundary_ids)


class ListedToken(TypedDict):
    """What a tokenizer_config.json says of a token."""

    content: str
    special: NotRequired[bool]
    lstrip: NotRequired[bool]
    rstrip: NotRequired[bool]
    single_word: NotRequired[bool]
    normalized: NotRequired[bool]


class TokenizerConfig(TypedDict):
    """What is read of a tokenizer_config.json, apart from the roles of tokens."""

    added_tokens_decoder: NotRequired[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], ListedToken] | None]
    tokenizer_class: NotRequired[str | None]
    add_bos_token: NotRequired[bool | None]
    add_prefix_space: NotRequired[bool | None]
    legacy: NotRequired[bool | None]


def _add_listed(inner: tokenizers.Tokenizer, folder: Path, roles: Mapping[str, str | None], *, keeps_ids: bool) -> None:
    """
    Add the tokens that other files of a folder list. `keeps_ids`: one that the tokenizer has already keeps its ID, as
    in transformers. Raises DataError for a token that would get another ID.
    """
    listed = {int(id): token for id, token in (_config_of(folder).get("added_tokens_decoder") or {}).items()}
    more = dict(_told(folder / ADDED_TOKENS, dict[str, TokenId]))
    more |= {token["content"]: id for id, token in listed.items()}
    details = {token["content"]: token for token in listed.values()}
    known, added = inner.get_vocab(with_added_tokens=True), inner.get_added_tokens_decoder().values()
    present = {token.content for token in added} if keeps_ids else set[str]()
    for name, id in sorted(more.items(), key=lambda pair: pair[1]):
        if name in present or not name:
            continue
        if known.get(name, len(known)) != id and not (keeps_ids and name in known):
            what = f"gives the token {name!r} the ID {id}, which is not the next one"
            hint = "Download the folder again." if keeps_ids else f"Use a folder that has a {FILE}."
            raise DataError(what, where=str(folder), hint=hint)
        token = details.get(name, ListedToken(content=name, special=not listed))
        is_special = token.get("special", False) or name in roles.values()
        how = {key: token.get(key, False) for key in ("lstrip", "rstrip", "single_word", "normalized")}
        entry = AddedToken(name, special=is_special, **how)
        inner.add_special_tokens([entry]) if is_special else inner.add_tokens([entry])
        known.setdefault(name, id)


def _complete(inner: tokenizers.Tokenizer, folder: Path, roles: Mapping[str, str | None]) -> None:
    """What opens a text, for a tokenizer without a tokenizer.json: bos_token, and a space of SentencePiece."""
    config = _config_of(folder)
    is_llama = (config.get("tokenizer_class") or "").startswith("Llama")
    if is_llama if (opens := config.get("add_bos_token")) is None else opens:
        _open_with(inner, roles.get("bos_token"))
    if config.get("legacy") is False and "Prepend" in _settings(inner.normalizer):  # not after special tokens
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)


def _config_of(folder: Path) -> TokenizerConfig:
    return _told(folder / TOKENIZER_CONFIG, TokenizerConfig)


def _told(file: Path, kind: Callable[..., T]) -> T:
    """What a file of settings says that a folder may lack."""
    if not os.path.isfile(file):
        return kind()
    return read_record(file, kind, error=DataError, fix="It is damaged, or of another kind.")


def _open_with(inner: tokenizers.Tokenizer, token: str | None) -> None:
    """Put a special token before each text, as transformers does."""
    if token is not None and (id := inner.token_to_id(token)) is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, id)]
        )


def from_json(
    content: str | dict[str, Any],
    where: str,
    roles: Mapping[str, str | None],
    boundary_ids: Sequence[int] = (),
    *,
    opens: bool = False,
) -> Tokenizer:
    """
    As `load_foreign`, from the text or the content of a tokenizer.json. `where` names its file in errors. `opens`: a
    text opens with bos_token, also if the tokenizer does not say so.
    """
    inner = _json(content, where, foreign=True)
    if opens and inner.post_processor is None:
        _open_with(inner, roles.get("bos_token"))
    return _foreign(inner, where, roles, boundary_ids)


def roles_of(folder: Path) -> dict[str, str | None]:
    """The special tokens of a model by their roles, as its folder names them; {} for a file."""
    roles: dict[str, str | None] = {}
    for name in (SPECIAL_MAP, TOKENIZER_CONFIG):
        said = _told(folder / name, dict[str, Any])
        for role in ROLE_NAMES:
            value = said.get(role)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                roles[role] = value
    return roles


def _foreign(
    inner: tokenizers.Tokenizer, where: str, roles: Mapping[str, str | None], boundary_ids: Sequence[int] = ()
) -> Tokenizer:
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    # as transformers does; a role whose token is not in the vocabulary would be a new row
    candidates = [name for name in dict.fromkeys(roles.values()) if name is not None and name not in special]
    named = [name for name in candidates if inner.token_to_id(name) is not None]
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in named if name])
    known = inner.get_vocab(with_added_tokens=True)
    if len(set(known.values())) < len(known):
        raise DataError("assigns one ID to two tokens", where=where, hint=_OTHER)
    tokenizer = Tokenizer(inner, roles, boundary_ids)
    unknown = tokenizer.outline["model"]["unk_token"]
    for token in tokenizer.outline["added_tokens"]:
        if token["special"] and token["content"] != unknown and token["id"] in tokenizer.encode(token["content"]):
            raise DataError(f"encodes the plain text {token['content']!r} as a special token", where=where, hint=_OTHER)
    return tokenizer


def check_ids(tokenizer: Tokenizer, base: Tokenizer, where: str) -> None:
    """Raises DataError where the tokenizer of adapters gives a token of their base another ID."""
    ids, expected = (
        {**spec["model"]["vocab"], **{token["content"]: token["id"] for token in spec["added_tokens"]}}
        for spec in (tokenizer.spec, base.spec)
    )
    if odd := next((name for name, id in expected.items() if ids.get(name, id) != id), None):
        what = f"its tokenizer gives {shorten(repr(odd))} the ID {ids[odd]}, and that of the base {expected[odd]}"
        hint = "Use the base of these adapters, or remove the tokenizer from their folder."
        raise DataError(what, where=where, hint=hint)


_OTHER = "Use another tokenizer."


def with_special(inner: tokenizers.Tokenizer, where: str, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """The same tokenizer, with missing special tokens at its end. Raises DataError for duplicate token IDs."""
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    tokenizer = Tokenizer(inner)
    ids = inner.get_vocab(with_added_tokens=True).values()
    if len(set(ids)) < len(ids) or not set(tokenizer.special.values()) <= tokenizer.special_ids:
        raise DataError("assigns one ID to two tokens after special tokens are added", where=where)
    return tokenizer


def extended(tokenizer: Tokenizer, where: str, special: Sequence[str]) -> tuple[Tokenizer, dict[str, int]]:
    """A tokenizer with special tokens that it lacked, and the IDs that these got. Raises DataError as `load` does."""
    spec = {**tokenizer.spec, "post_processor": None}
    longer = with_special(parsed(json.dumps(spec), where), where, special)
    ids = {name: longer.special_id(name) for name in special if not tokenizer.holds(name)}
    return longer, {name: id for name, id in ids.items() if id is not None}


def _json(content: str | dict[str, Any], where: str, *, foreign: bool = False) -> tokenizers.Tokenizer:
    inner = parsed(content, where)
    model, decoder = inner.model, _settings(inner.decoder)
    by_bytes = "ByteLevel" in decoder and "ByteLevel" in _settings(inner.pre_tokenizer)
    by_pieces = bool(getattr(model, "byte_fallback", False)) and "ByteFallback" in decoder
    if not isinstance(model, BPE) or not (by_bytes or by_pieces):
        hint = "Use a tokenizer with byte-level BPE or BPE with byte fallback."
        kind = type(model).__name__
        raise DataError(f"is a {kind} whose token IDs do not stand for bytes", where=where, hint=hint)
    # tokens around a text would make the exported file's token IDs differ from ours, and dropout random token IDs
    unset = {"truncation": inner.truncation, "padding": inner.padding, "BPE dropout": model.dropout}
    if names := [name for name, value in unset.items() if value]:
        are = "is" if len(names) == 1 else "are"
        info(f"{where}: {' and '.join(names)} {are} set to none, so that a text always has the same IDs", "yellow")
    # a foreign one says there what opens a text, and its own files keep it
    if not names and model.dropout is None and (foreign or inner.post_processor is None):
        return inner
    spec: dict[str, Any] = json.loads(inner.to_str())
    after = spec["post_processor"] if foreign else None
    kept = {"post_processor": after, "truncation": None, "padding": None, "model": spec["model"] | {"dropout": None}}
    return parsed(spec | kept, where)


def _settings(component: Any) -> str:
    """A normalizer, pre-tokenizer or decoder as JSON; "" for none."""
    return "" if component is None else component.__getstate__().decode()


WITHOUT_JSON: dict[str, PatternName] = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizer"), "gpt2"),
    "Qwen2Tokenizer": "qwen2",
}
"""How words are cut where a folder has merges and a vocabulary alone, by transformers' class."""
_CONVERT = f"With transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes a {FILE}."


def _gpt2(merges: Path, vocab: Path) -> tokenizers.Tokenizer:
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    ids = read_record(vocab, dict[str, TokenId], error=DataError, fix="It is damaged, or of another kind.")
    if problem := problem_of_ids(ids):
        raise DataError(problem, where=str(vocab), hint="The file is damaged. Create or download it again.")
    if wrong := next((pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys()), None):
        raise DataError(f"holds the merge {' '.join(wrong)!r}, which is not in {vocab.name}", where=str(merges))
    config = _config_of(vocab.parent)
    name = config.get("tokenizer_class") or "GPT2Tokenizer"
    pattern = WITHOUT_JSON.get(name.removesuffix("Fast"))
    if pattern is None or config.get("add_prefix_space"):
        what = f"is of the class {name}" if pattern is None else "puts a space before each text"
        raise DataError(f"{what}, which is read only from a {FILE}", where=str(vocab.parent), hint=_CONVERT)
    inner = byte_level(models.BPE(vocab=ids, merges=[(pair[0], pair[1]) for pair in pairs]), pattern)
    inner.normalizer = normalizers.NFC() if pattern == "qwen2" else None
    return inner


def _tiktoken(path: Path, pattern: PatternName | None) -> tokenizers.Tokenizer:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError("is not a base64 token and a rank", where=f"{path}:{number}") from None
    return _from_ranks(ranks, pattern, path)


def _read_llmc(path: Path, pattern: PatternName | None) -> tokenizers.Tokenizer:
    tokens, end = read(path)
    said = pattern_of(path)
    if pattern is not None and said not in (None, pattern):
        hint = "Remove tokenizer.pattern: the file defines it."
        raise DataError(f"splits words as {said}, not as {pattern}", where=str(path), hint=hint)
    names = {name.encode() for name in EVERY_SPECIAL}
    first = next((id for id, token in enumerate(tokens) if token not in names), len(tokens))
    last = next((id for id in range(len(tokens), first, -1) if tokens[id - 1] not in names), first)
    if first <= end < last or tokens[end] != DOCUMENT.encode():
        hint = f"Use a file of byte ranks and merges, with {DOCUMENT} before or after them."
        raise DataError(f"has {tokens[end]!r} as token {end}, the end of text", where=str(path), hint=hint)
    before, after = ([one.decode() for one in some] for some in (tokens[:first], tokens[last:]))
    ranks = {token: rank for rank, token in enumerate(tokens[first:last])}
    usual: PatternName | None = "gpt2" if end + 1 == GPT2_SIZE else None
    inner = _from_ranks(ranks, pattern or said or usual, path, before)
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in before + after])
    if inner.get_vocab_size() != len(tokens):
        raise DataError(
            "holds one token twice", where=str(path), hint="The file is damaged. Create or download it again."
        )
    return inner


def _from_ranks(
    ranks: dict[bytes, int], pattern: PatternName | None, path: Path, before: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Byte-level BPE of tokens in merge order, after special tokens, which have the first token IDs."""
    if pattern is None:
        hint = f"Set tokenizer.pattern to one of {', '.join(PATTERNS)}."
        raise DataError("does not define how text is split into words", where=str(path), hint=hint)
    if set(ranks.values()) != set(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise DataError("does not rank 256 bytes and their merges from 0", where=str(path))
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = halves(token, ranks)
        if len(token) > 1 and len(parts) > 2:  # made of what ranks after it, if at all
            cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
            merges += [(spelled[left], spelled[right]) for left, right in cuts if left in ranks and right in ranks]
        elif len(token) > 1:
            merges.append((spelled[parts[0]], spelled[parts[1]]))
    vocab = {name: id for id, name in enumerate(before)}
    vocab |= {spelled[token]: rank + len(before) for token, rank in ranks.items()}
    # tiktoken takes a word that is a token as it is
    return byte_level(models.BPE(vocab=vocab, merges=merges, ignore_merges=True), pattern)


def halves(token: bytes, ranks: dict[bytes, int]) -> Sequence[bytes]:
    """What the merges before a token's own make of its bytes: two parts, but for tokens that no merge makes."""
    parts, last = [token[place : place + 1] for place in range(len(token))], ranks[token]
    while len(parts) > 2:
        joined = [ranks.get(left + right, last) for left, right in pairwise(parts)]
        best = min(joined)
        if best >= last:
            break
        index = joined.index(best)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def read_sentencepiece(data: bytes, where: str, *, foreign: bool = False) -> tokenizers.Tokenizer:
    """
    The tokenizer of a `.model` file. Raises DataError with the reason if the token IDs cannot be the same. `foreign`:
    also one that makes runs of spaces one, as the model that was trained with it expects.
    """
    try:
        model = parse_sentencepiece(data)
    except (IndexError, KeyError, ValueError, struct.error):
        raise DataError("is not a SentencePiece model", where=where) from None
    return of_pieces(model, where, foreign=foreign)


def of_pieces(model: SentencePieceModel, where: str, *, foreign: bool = False) -> tokenizers.Tokenizer:
    """The tokenizer of SentencePiece's pieces. Raises DataError with the reason if the token IDs cannot be the same."""
    if problem := _sentencepiece_problem(model, foreign=foreign):
        raise DataError(f"cannot be imported with the same token IDs: {problem}", where=where)
    vocab = {piece.text: id for id, piece in enumerate(model.pieces)}
    unknown = next((piece.text for piece in model.pieces if piece.type == UNKNOWN), None)
    bpe = models.BPE(
        vocab=vocab,
        merges=pair_merges(model.pieces),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )
    inner = tokenizers.Tokenizer(bpe)
    first = [normalizers.Prepend(SPACE)] if model.puts_space_first else []
    squeezed = [
        normalizers.Replace(tokenizers.Regex(pattern), new)
        for pattern, new in ((rf"\A +|[ {SPACE}]+\z", ""), (" {2,}", " "))
        if model.squeezes_space
    ]
    inner.normalizer = normalizers.Sequence([*squeezed, *first, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if model.puts_space_first else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    inner.decoder = decoders.Sequence(steps)
    special = [piece.text for piece in model.pieces if piece.type == CONTROL]
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    # one with a space in it is never found: spaces are U+2581 by the time it is looked for
    users = [piece.text for piece in model.pieces if piece.type == USER and " " not in piece.text]
    inner.add_tokens([AddedToken(name, normalized=SPACE in name, special=False) for name in users])
    return inner


MAX_PIECE = 4096
"""Characters of a piece: each of its cuts is looked up."""


def _sentencepiece_problem(model: SentencePieceModel, *, foreign: bool) -> str:
    users = [piece.text for piece in model.pieces if piece.type == USER]
    kinds = {1: "unigram", 3: "words", 4: "characters"}
    if model.kind != BPE_KIND:
        return f"it is a model of {kinds.get(model.kind, 'an unknown kind')}, not BPE"
    if model.charsmap or (model.squeezes_space and (users or not foreign)):
        return "it changes text before it encodes it (normalization, or runs of space made one)"
    if any(piece.type == UNUSED for piece in model.pieces):
        return "it has pieces marked as unused"
    if not model.byte_fallback:
        return "it has no bytes to fall back to, so it loses text"
    if users and model.puts_space_first and not model.spaces_every_part:
        return "it puts a space before each text and has user-defined symbols"
    if any(len(piece.text) == 1 and piece.type in (CONTROL, UNKNOWN) for piece in model.pieces):
        return "it has a special token of one character"
    if len({piece.text for piece in model.pieces}) < len(model.pieces):
        return "it has one piece twice"
    if any(len(piece.text) > MAX_PIECE for piece in model.pieces):
        return f"it has a piece of more than {MAX_PIECE:,} characters"
    return ""


def pair_merges(pieces: Iterable[SentencePieceToken]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, in the order of its score; of one piece's, shorter left parts first."""
    learned = [piece for piece in pieces if piece.type == NORMAL]
    known = {piece.text for piece in learned}
    pairs = []
    for piece in sorted(learned, key=lambda piece: -piece.score):
        cuts = ((piece.text[:place], piece.text[place:]) for place in range(1, len(piece.text)))
        pairs += [(left, right) for left, right in cuts if left in known and right in known]
    return pairs


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """What a `.model` file says. Raises ValueError, KeyError, IndexError or struct.error for what is none."""
    pieces, trainer, normalizer = [], dict[int, Any](), dict[int, Any]()
    for number, value in _fields(data, PARTS):
        if number == 1:
            fields = dict(_fields(value, PIECE))
            pieces.append(
                SentencePieceToken(
                    fields[1].decode(), struct.unpack("<f", fields.get(2, bytes(4)))[0], fields.get(3, NORMAL)
                )
            )
        elif number == 2:
            trainer = dict(_fields(value, TRAINER))
        elif number == 3:
            normalizer = dict(_fields(value, NORMALIZER))
    if not pieces:
        raise ValueError("no pieces")
    return SentencePieceModel(
        pieces,
        kind=trainer.get(3, 1),
        charsmap=normalizer.get(2, b""),
        puts_space_first=bool(normalizer.get(3, 1)),
        squeezes_space=bool(normalizer.get(4, 1)),
        byte_fallback=bool(trainer.get(35, 0)),
    )


def _fields(data: bytes, types: Mapping[int, type]) -> Iterator[tuple[int, Any]]:
    """
    Number and value of each field of a protocol buffer: int, or bytes for all that is longer. Raises ValueError where a
    field of `types` is of another type; others may be of any.
    """
    for number, value in _any_fields(data):
        if not isinstance(value, types.get(number, int | bytes)):
            raise ValueError(f"field {number} is {type(value).__name__}")
        yield number, value


def _any_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        match tag & 7:
            case 0:
                value, offset = _varint(data, offset)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, offset = _varint(data, offset)
            case 5:
                size = 4
            case wire:
                raise ValueError(f"wire type {wire}")
        if offset + size > len(data):
            raise ValueError("cut off")
        yield tag >> 3, data[offset : offset + size]
        offset += size


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[offset : offset + MOST_VARINT_BYTES]:
        value, shift, offset = value | (byte & 0x7F) << shift, shift + 7, offset + 1
        if byte < 0x80:
            return value, offset
    raise ValueError("an endless number")
