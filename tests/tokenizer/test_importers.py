import base64
import json
import re
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import tiktoken
import tiktoken.load
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bloomery.core.errors import DataError
from bloomery.tokenizer import importers
from bloomery.tokenizer.chat_template import EVERY_SPECIAL
from bloomery.tokenizer.fast_encode import HARD, Encoder
from bloomery.tokenizer.tokenizer import FILE, PATTERNS, SPECIAL, PatternName, Tokenizer, byte_letters
from bloomery.tokenizer.train import train_byte_level
from tests.shared import needs
from tests.tokenizer.made import CODE, ELSEWHERE, TEXTS, small, training_texts
from tests.tokenizer.shared import GPT2, documents

ENOUGH = [*training_texts()[::10], *HARD, CODE, ELSEWHERE]
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
"""As tiktoken publishes it for cl100k_base; ours by the name llama3 cuts alike."""


def spelled(text: bytes) -> str:
    letters = byte_letters()
    return "".join(letters[byte] for byte in text)


@cache
def ranks() -> dict[bytes, int]:
    """Bytes, then merges of the small tokenizer, as tiktoken numbers them."""
    back = {letter: byte for byte, letter in byte_letters().items()}
    merged = [bytes(back[letter] for letter in left + right) for left, right in small().spec["model"]["merges"]]
    return {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *merged])}


def ranked(folder: Path) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks().items()]
    (folder / "some.tiktoken").write_text("".join(lines), encoding="utf-8")
    return folder / "some.tiktoken"


def assert_ours_after(tokenizer: Tokenizer, size: int) -> None:
    assert sorted(tokenizer.special.values()) == list(range(size, size + len(SPECIAL)))
    assert tokenizer.vocab_size == size + len(SPECIAL)


# --- tiktoken ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def from_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    file = ranked(tmp_path_factory.mktemp("ranks"))
    read = tiktoken.load.load_tiktoken_bpe(str(file))
    assert read == ranks()
    theirs = tiktoken.Encoding("theirs", pat_str=CL100K, mergeable_ranks=read, special_tokens={})
    return importers.load(file, "llama3"), theirs


@given(st.lists(TEXTS, max_size=5))
def test_ranks_of_tiktoken_give_its_ids(from_ranks: tuple[Tokenizer, tiktoken.Encoding], texts: list[str]) -> None:
    tokenizer, theirs = from_ranks
    for text in texts:
        assert tokenizer.encode(text) == theirs.encode_ordinary(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_hard_texts_have_the_ids_of_tiktoken(from_ranks: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    tokenizer, theirs = from_ranks
    assert tokenizer.encode_batch(ENOUGH) == [theirs.encode_ordinary(text) for text in ENOUGH]
    assert_ours_after(tokenizer, len(ranks()))
    assert Encoder(tokenizer).name == "tiktoken"


def test_a_token_that_no_merge_makes_is_taken_as_a_word_as_tiktoken_does(tmp_path: Path) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"bc", b"ab", b"abcd", b"abc"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (tmp_path / "odd.tiktoken").write_text("".join(lines), encoding="utf-8")
    theirs = tiktoken.Encoding(
        "odd", pat_str=PATTERNS["gpt2"].regex, mergeable_ranks={t: r for r, t in enumerate(tokens)}, special_tokens={}
    )
    tokenizer = importers.load(tmp_path / "odd.tiktoken", "gpt2")
    for text in ("abcd", "abc", "xabcd", "abcdabcd abcd abc bcd", "abbc", "aabcc"):
        assert tokenizer.encode(text) == theirs.encode_ordinary(text), text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("YQ== 0\nnonsense\n", r"tiktoken:2: is not a base64 token"),
        ("YQ== 0\n!!! 1\n", r"tiktoken:2: is not a base64 token"),
        ("YQ== zero\n", r"tiktoken:1: is not a base64 token"),
        ("YQ== 0\nYg== 1\n", "does not rank 256 bytes"),
    ],
)
def test_broken_ranks_are_an_error_that_names_the_line(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "a.tiktoken").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=why):
        importers.load(tmp_path / "a.tiktoken", "gpt2")


def test_ranks_need_the_name_of_a_pattern_and_nothing_else_takes_one(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"(?s)does not define how text is split.*tokenizer\.pattern to one of gpt2, llama3"
    ):
        importers.load(ranked(tmp_path))
    small().save(tmp_path)
    with pytest.raises(DataError, match="has its own rule to split words"):
        importers.load(tmp_path, "gpt2")


# --- GPT-2 ---------------------------------------------------------------------------------------------------------

needs_gpt2 = needs(GPT2 / "vocab.bpe")


@pytest.fixture(scope="module")
def gpt2() -> tuple[Tokenizer, tiktoken.Encoding]:
    files = str(GPT2 / "vocab.bpe"), str(GPT2 / "encoder.json")
    found = tiktoken.load.data_gym_to_mergeable_bpe_ranks(*files)
    theirs = tiktoken.Encoding("gpt2", pat_str=PATTERNS["gpt2"].regex, mergeable_ranks=found, special_tokens={})
    return importers.load(GPT2), theirs


@needs_gpt2
def test_gpt2_is_read_with_its_ids(gpt2: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    tokenizer, theirs = gpt2
    texts = [*ENOUGH, *documents(400)]
    assert tokenizer.encode_batch(texts) == [theirs.encode_ordinary(text) for text in texts]
    assert tokenizer.encode("hello world") == [31373, 995]
    assert tokenizer.document_id == 50256
    assert sorted(tokenizer.special.values()) == [50256, *range(50257, 50256 + len(SPECIAL))]
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in ENOUGH)


@needs_gpt2
def test_gpt2_is_encoded_fast_with_its_ids(gpt2: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    encoder = Encoder(gpt2[0])
    assert encoder.name == "tiktoken"
    assert [ids.tolist() for ids in encoder.encode_batch(ENOUGH)] == gpt2[0].encode_batch(ENOUGH)


def test_a_merge_that_the_vocabulary_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_text(json.dumps({"a": 0, "b": 1}), encoding="utf-8")
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"vocab\.bpe: holds the merge 'a b', which is not in encoder\.json"):
        importers.load(tmp_path)


# --- tokenizer.json ------------------------------------------------------------------------------------------------


def byte_bpe() -> tokenizers.Tokenizer:
    """As the hub has many: GPT-2's own splitter, a token around the text, marks of a conversation, added words."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(training_texts(), trainer)
    made.add_special_tokens(["<s>", "<|im_end|>"])
    single = "<s> $A"
    made.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def with_words() -> tokenizers.Tokenizer:
    made = byte_bpe()
    made.normalizer = normalizers.NFC()
    made.add_tokens(["Größe", AddedToken("\n\n", normalized=False)])
    made.enable_truncation(10)
    made.enable_padding()
    return made


def like_llama() -> tokenizers.Tokenizer:
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {name: id for id, name in enumerate(["<unk>", "<s>", *alphabet, "\u2581", *"abcdefgh", "ab", "\u2581ab"])}
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("a", "b"), ("\u2581", "ab")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<s>"])
    return made


@pytest.mark.parametrize("text", ["ab", " ab", "abab", "b a", "x é\n", "  ", ""])
def test_a_text_that_follows_another_gets_no_space_in_front(text: str, tmp_path: Path) -> None:
    like_llama().save(str(tmp_path / FILE))
    tokenizer = importers.load(tmp_path)
    assert tokenizer.decode_bytes(tokenizer.encode_after(text)) == text.encode()
    assert tokenizer.decode_bytes(tokenizer.encode("ab")) == b" ab"


@pytest.mark.parametrize("make", [byte_bpe, with_words, like_llama])
def test_a_tokenizer_file_gives_the_ids_of_the_library(make: Any, tmp_path: Path) -> None:
    original = make()
    original.save(str(tmp_path / FILE))
    tokenizer = importers.load(tmp_path)
    original.no_truncation()
    original.no_padding()
    original.encode_special_tokens = True
    for text in ENOUGH:
        ids = tokenizer.encode(text)
        assert ids == original.encode(text, add_special_tokens=False).ids
        back = tokenizer.decode(ids)
        assert back == (original.normalizer.normalize_str(text) if make is with_words else text)
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").hash == tokenizer.hash
    assert importers.load(tmp_path / "again").hash == tokenizer.hash
    assert_ours_after(tokenizer, original.get_vocab_size())
    encoder = Encoder(tokenizer, aloud=False)
    assert encoder.name == ("tokenizers" if make is with_words else "tiktoken")
    assert [ids.tolist() for ids in encoder.encode_batch(ENOUGH)] == tokenizer.encode_batch(ENOUGH)


@pytest.mark.parametrize("make", [byte_bpe, with_words, like_llama, None])
def test_the_outline_says_what_the_whole_file_says(make: Any, tmp_path: Path) -> None:
    tokenizer = small()
    if make is not None:
        make().save(str(tmp_path / FILE))
        tokenizer = importers.load(tmp_path / FILE)
    outline, model = dict(tokenizer.outline), tokenizer.spec["model"]
    assert outline.pop("model") == {name: model.get(name) for name in ("unk_token", "byte_fallback")}
    assert outline == {name: tokenizer.spec[name] for name in outline}
    assert {*outline} == {"added_tokens", "normalizer", "pre_tokenizer", "decoder"}


def test_no_text_becomes_a_special_token_that_came_along(tmp_path: Path) -> None:
    byte_bpe().save(str(tmp_path / FILE))
    tokenizer = importers.load(tmp_path / FILE)
    assert len(tokenizer.special_ids) == 2 + len(SPECIAL)
    for text in ("<s>", "a<|im_end|>b", "".join(SPECIAL)):
        assert not tokenizer.special_ids & set(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def broken() -> list[tuple[tokenizers.Tokenizer, str]]:
    words = tokenizers.Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False))
    split = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    split.pre_tokenizer = pre_tokenizers.Split(Regex("a"), "isolated")
    return [
        (words, "is a WordPiece"),
        (unigram, "is a Unigram"),
        (split, "is a BPE whose"),
    ]


@pytest.mark.parametrize("place", range(3))
def test_what_cannot_be_imported_says_why(place: int, tmp_path: Path) -> None:
    made, why = broken()[place]
    made.save(str(tmp_path / FILE))
    with pytest.raises(DataError, match=why):
        importers.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "no json", '{"version": "1.0"}', "\x00"])
def test_a_file_that_is_no_tokenizer_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"tokenizer\.json: .*(is not a tokenizer|cannot be read)"):
        importers.load(tmp_path)
    (tmp_path / "a.model").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        importers.load(tmp_path / "a.model")


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A tokenizer.json of the hub's kind, changed as JSON."""
    spec: dict[str, Any] = json.loads(byte_bpe().to_str())
    change(spec)
    (folder / FILE).write_text(json.dumps(spec), encoding="utf-8")
    return folder


def test_dropout_is_set_to_none_and_reported_so_that_a_text_always_has_the_same_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = importers.load(changed(tmp_path, lambda spec: None))
    assert capsys.readouterr().err == ""
    tokenizer = importers.load(changed(tmp_path, lambda spec: spec["model"].update(dropout=0.9)))
    assert f"{tmp_path / FILE}: BPE dropout is set to none" in capsys.readouterr().err
    texts = ["Hello there, this is the longest of all words"] * 5
    assert {tuple(tokenizer.encode(text)) for text in texts} == {tuple(wanted.encode(texts[0]))}
    assert tokenizer.hash == wanted.hash


IDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "2^31": (lambda spec: spec["model"]["vocab"].update(zzz=2**31), "has the ID 2147483648"),
    "10^4000": (lambda spec: spec["model"]["vocab"].update(zzz=10**4000), "has the ID 1000000000"),
    "negative": (lambda spec: spec["model"]["vocab"].update(zzz=-1), "has the ID -1"),
    "a float": (lambda spec: spec["model"]["vocab"].update(zzz=1.5), "has the ID 1.5"),
    "null": (lambda spec: spec["model"]["vocab"].update(zzz=None), "has the ID None"),
    "true": (lambda spec: spec["model"]["vocab"].update(zzz=True), "has the ID True"),
    "one twice": (lambda spec: spec["model"]["vocab"].update(zzz=5), "assigns one ID to two tokens"),
    "added at 2^31": (lambda spec: spec["added_tokens"][0].update(id=2**31), "has the ID 2147483648"),
    "added twice": (lambda spec: spec["added_tokens"].append(spec["added_tokens"][0]), "assigns one ID to two tokens"),
    "added and empty": (lambda spec: spec["added_tokens"][0].update(content=""), "an added token with an empty text"),
    "a list": (lambda spec: spec["model"]["vocab"].update(zzz=[1], zza=None), r"has the ID \[1\]"),
    "a panic while it is read": (
        lambda spec: spec["model"].update(continuing_subword_prefix="\u2581"),
        "is not a tokenizer",
    ),
    "a panic while it encodes": (
        lambda spec: spec.update(normalizer={"type": "Prepend", "prepend": ""}),
        "has a normalizer Prepend with an empty text",
    ),
    "added, of numbers": (lambda spec: spec.update(added_tokens=[1]), "is not a tokenizer"),
}


@pytest.mark.parametrize(("change", "why"), IDS.values(), ids=IDS)
def test_ids_that_no_tokenizer_has_are_refused_before_the_library_reserves_memory_for_them(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    changed(tmp_path, change)
    for read in (importers.load, Tokenizer.load):
        with pytest.raises(DataError, match=why) as caught:
            read(tmp_path)
        assert caught.value.where == str(tmp_path / FILE)
        assert caught.value.hint or "is not a tokenizer" in why


def test_a_vocabulary_of_gpt2_with_an_id_of_2_31_is_refused(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 2**31}), encoding="utf-8")
    with pytest.raises(DataError, match="b: input should be less than 2147483648"):
        importers.load(tmp_path)


def test_a_tokenizer_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[" * 100_000, encoding="utf-8")
    for read in (importers.load, Tokenizer.load):
        with pytest.raises(DataError, match="is not a tokenizer"):
            read(tmp_path)


def test_nothing_to_import_is_an_error_that_says_what_could_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(DataError, match=r"(?s)there is no tokenizer.*vocab\.bpe and encoder\.json"):
            importers.load(path)


# --- Tokenizer files of llm.c, laid out by hand, and those of GPT-2 ---------------------------------------------------


def by_hand(tokens: list[bytes], end: int, version: int = 2, cut: bytes = b"") -> bytes:
    body = b"".join(struct.pack("<B", len(token)) + token for token in tokens)
    return struct.pack("<4i1008s", 20240328, version, len(tokens), end if version == 2 else 0, cut) + body


def small_file(folder: Path) -> Path:
    """Bytes, then merges of the small tokenizer, then the token at the end of a text."""
    tokens = [*ranks(), b"<|endoftext|>"]
    (folder / "some_tokenizer.bin").write_bytes(by_hand(tokens, len(tokens) - 1))
    return folder / "some_tokenizer.bin"


@pytest.fixture(scope="module")
def read_in(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return importers.load(small_file(tmp_path_factory.mktemp("llmc")), "qwen2")


@given(TEXTS)
def test_a_file_laid_out_as_documented_is_that_tokenizer(read_in: Tokenizer, text: str) -> None:
    assert [small().decode_bytes([id]) for id in small().encode(text)] == [
        read_in.decode_bytes([id]) for id in read_in.encode(text)
    ]
    assert read_in.decode(read_in.encode(text)) == text


def test_ids_stay_and_our_special_tokens_come_after(read_in: Tokenizer) -> None:
    size = len(ranks()) + 1
    assert read_in.document_id == size - 1
    assert read_in.vocab_size == size + len(SPECIAL) - 1
    assert [read_in.decode_bytes([id]) for id in range(size - 1)] == list(ranks())


def test_what_is_written_is_laid_out_as_documented(tmp_path: Path, read_in: Tokenizer) -> None:
    importers.write(tmp_path / "out.bin", read_in)
    tokens, end = importers.read(tmp_path / "out.bin")
    assert end == read_in.document_id
    assert tokens[: end + 1] == [*ranks(), b"<|endoftext|>"]
    assert tokens[end + 1] == b"<|end|>"
    assert (tmp_path / "out.bin").read_bytes() == by_hand(tokens, end, cut=b"qwen2")


@pytest.mark.parametrize("pattern", get_args(PatternName))
def test_a_tokenizer_that_was_trained_here_comes_back_from_its_file(pattern: PatternName, tmp_path: Path) -> None:
    """Its special tokens have the first ids; those of other templates, which came later, have the last."""
    train_byte_level(training_texts(), 500, pattern).save(tmp_path)
    whole = importers.load(tmp_path, special=EVERY_SPECIAL)
    assert whole.document_id == 0
    assert whole.special_id(EVERY_SPECIAL[-1]) == whole.vocab_size - 1
    importers.write(tmp_path / "t.bin", whole)
    found = importers.load(tmp_path / "t.bin")
    assert [found.special_id(name) for name in EVERY_SPECIAL] == [whole.special_id(name) for name in EVERY_SPECIAL]
    ids = range(whole.vocab_size)
    assert [found.decode_bytes([id]) for id in ids] == [whole.decode_bytes([id]) for id in ids]
    for text in (*training_texts()[::20], *EVERY_SPECIAL, " ".join(EVERY_SPECIAL), ELSEWHERE, CODE):
        assert found.encode(text) == whole.encode(text)
        assert not found.special_ids & set(found.encode(text))
    other: PatternName = "gpt2" if pattern != "gpt2" else "qwen2"
    with pytest.raises(DataError, match=f"splits words as {pattern}, not as {other}"):
        importers.load(tmp_path / "t.bin", other)


def test_a_special_token_stands_before_or_after_all_others_and_once(tmp_path: Path) -> None:
    document, merges = b"<|endoftext|>", list(ranks())
    for tokens, end, told in (
        ([*merges[:300], document, *merges[300:]], 300, "has b'<|endoftext|>' as token 300, the end of text"),
        ([b"<|end|>", *merges, document], 0, "has b'<|end|>' as token 0, the end of text"),
        ([document, *merges, document], 0, "holds one token twice"),
    ):
        (tmp_path / "t.bin").write_bytes(by_hand(tokens, end))
        with pytest.raises(DataError, match=re.escape(told)):
            importers.load(tmp_path / "t.bin", "qwen2")


def test_version_1_ends_texts_with_50256(tmp_path: Path) -> None:
    tokens = [*ranks(), *(b"%05d" % number for number in range(len(ranks()), 50_256)), b"<|endoftext|>"]
    (tmp_path / "one.bin").write_bytes(by_hand(tokens, 0, version=1))
    assert importers.read(tmp_path / "one.bin") == (tokens, 50_256)


@pytest.mark.slow
@needs(GPT2)
def test_gpt2_comes_back_the_same_from_a_file_of_llm_c(tmp_path: Path) -> None:
    whole = importers.load(GPT2)
    tokens = [whole.decode_bytes([id]) for id in range(50_256)]
    (tmp_path / "gpt2_tokenizer.bin").write_bytes(by_hand([*tokens, b"<|endoftext|>"], 50_256))
    found = importers.load(tmp_path / "gpt2_tokenizer.bin")  # of so many tokens, it is GPT-2's
    for text in ("Hello, world's 1234   \n\n end", " naïve – «ёлка» 東京都 😀", "def f(x):\n\treturn x ** 2"):
        assert found.encode(text) == whole.encode(text)
    assert found.special == whole.special


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"short", "has 5 bytes, less than a header"),
        (by_hand([b"a", b"b"], 1)[:-1], "its 2 tokens do not fill its 1027 bytes"),
        (by_hand([b"a", b"b"], 1) + b"\1", "its 2 tokens do not fill"),
        (by_hand([b"a", b"b"], 2), "names token 2 as the end of text, but has 2 tokens"),
        (struct.pack("<256i", 20240326, 3, *[0] * 254), "begins with 20240326 and 3, which is not an llm.c tokenizer"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(DataError, match=f"t.bin: {told}"):
        importers.load(tmp_path / "t.bin", "gpt2")


def test_how_words_are_cut_has_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not define how text is split into words"):
        importers.load(small_file(tmp_path))
