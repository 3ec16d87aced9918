"""Token files of others: bytes laid out by hand from the documented layouts, and what the loader reads of them."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.shards import format
from bloomery.shards import importers as shards_importers
from bloomery.shards.loader import IGNORE, PackedDataset
from bloomery.tokenizer import importers
from tests.tokenizer.made import small
from tests.tokenizer.test_importers import small_file

VOCAB = small().vocab_size
DOCUMENT = small().document_id
LONG = [DOCUMENT, 5, 6, 7, 8, DOCUMENT, 9, 10, 11, DOCUMENT, 12, 13]


def by_hand(ids: list[int], *, magic: int = 20240520, version: int = 1, letter: str = "H", count: int = -1) -> bytes:
    """A token file of llm.c: 256 int32, then the ids, little-endian."""
    numbers = [magic, version, len(ids) if count < 0 else count, *[0] * 253]
    return struct.pack("<256i", *numbers) + struct.pack(f"<{len(ids)}{letter}", *ids)


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def speed_run(root: Path) -> Path:
    """Two shards to train on, the second of which begins in the midst of a document, and one to validate on."""
    files = {
        "fineweb_train_000001.bin": by_hand(LONG),
        "fineweb_train_000002.bin": by_hand([14, 15, DOCUMENT, 16, 17, 18]),
        "fineweb_val_000000.bin": by_hand([DOCUMENT, 20, 21, 22, 23]),
    }
    return folder_of(root, files)


@pytest.mark.parametrize(("magic", "version", "letter"), [(20240520, 1, "H"), (20240801, 7, "I")])
def test_bytes_laid_out_as_llm_c_documents_them_are_those_tokens(
    tmp_path: Path, magic: int, version: int, letter: str
) -> None:
    file = tmp_path / "some.bin"
    file.write_bytes(by_hand(LONG, magic=magic, version=version, letter=letter))
    assert format.read_tokens(file).tolist() == LONG


@pytest.mark.parametrize(("vocab_size", "layout"), [(700, (20240520, 1, "H")), (70_000, (20240801, 7, "I"))])
def test_shards_of_ours_are_bytes_as_llm_c_documents_them(
    tmp_path: Path, vocab_size: int, layout: tuple[int, int, str]
) -> None:
    ids = [*LONG, vocab_size - 1]
    format.write(tmp_path / "x", np.array(ids), vocab_size=vocab_size, starts=[0], tokenizer_hash="a" * 64)
    magic, version, letter = layout
    assert (tmp_path / "x.bin").read_bytes() == by_hand(ids, magic=magic, version=version, letter=letter)


def test_a_folder_of_llm_c_can_be_trained_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stats = shards_importers.adopt(speed_run(tmp_path / "theirs"), out, small())
    assert (stats["tokens"], stats["documents"], stats["held_out_documents"]) == (18, 5, 1)
    assert [path.name for path in format.names(out, "train")] == ["train-00000", "train-00001"]
    assert format.read(out / "train-00000", verify=True).starts.tolist() == [0, 5, 9]
    assert format.read(out / "train-00001", verify=True).starts.tolist() == [0, 2]
    samples = PackedDataset(out, "train", 5, small().hash, verify=True)
    for split in ("train", "val"):
        with pytest.raises(
            DataError, match=r"\nImport longer token files, or lower pretrain\.model\.context_length\.$"
        ):
            PackedDataset(out, split, 500, small().hash)
    batch = samples.batch(np.arange(samples.num_samples))
    assert batch.ids.tolist() == [LONG[:5], LONG[5:10], [14, 15, DOCUMENT, 16, 17]]
    assert batch.targets.tolist() == [LONG[1:6], LONG[6:11], [15, DOCUMENT, 16, 17, 18]]
    assert batch.positions[2].tolist() == [0, 1, 0, 1, 2]


def test_files_are_linked_and_not_copied(tmp_path: Path) -> None:
    theirs = speed_run(tmp_path / "theirs")
    shards_importers.adopt(theirs, tmp_path / "out", small())
    assert (tmp_path / "out" / "train-00001.bin").samefile(theirs / "fineweb_train_000002.bin")


def test_files_without_a_header_are_read_when_it_is_said_what_they_hold(tmp_path: Path) -> None:
    raw = struct.pack(f"<{len(LONG)}H", *LONG)
    theirs = folder_of(tmp_path / "theirs", {"train.bin": raw, "val.bin": raw})
    shards_importers.adopt(theirs, tmp_path / "out", small(), headerless="uint16")
    shard = format.read(tmp_path / "out" / "train-00000", verify=True)
    assert (shard.tokens.tolist(), shard.starts.tolist()) == (LONG, [0, 5, 9])
    short = folder_of(tmp_path / "short", {"train.bin": raw, "val.bin": raw[:2]})
    assert shards_importers.adopt(short, tmp_path / "one", small(), headerless="uint16")["held_out_tokens"] == 1
    with pytest.raises(DataError, match="begins with 20240520: it has a header"):
        shards_importers.adopt(speed_run(tmp_path / "headed"), tmp_path / "other", small(), headerless="uint16")


def test_four_bytes_a_token_are_not_read_as_two(tmp_path: Path) -> None:
    raw = struct.pack(f"<{len(LONG)}I", *LONG)
    theirs = folder_of(tmp_path / "theirs", {"train.bin": raw, "val.bin": raw})
    with pytest.raises(DataError, match=r"train.bin: every second token is 0(.|\n)*uint32"):
        shards_importers.adopt(theirs, tmp_path / "out", small(), headerless="uint16")
    assert shards_importers.adopt(theirs, tmp_path / "out", small(), headerless="uint32")["tokens"] == len(LONG)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), st.sampled_from(["H", "I"]), st.integers(1, 9))
@settings(max_examples=60)
def test_whatever_the_ids_are_they_come_back_with_the_bounds_of_documents(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], letter: str, block: int
) -> None:
    root = tmp_path_factory.mktemp("any")
    magic, version = (20240520, 1) if letter == "H" else (20240801, 7)
    file = by_hand([*ids, DOCUMENT], magic=magic, version=version, letter=letter)
    folder_of(root, {"a_train.bin": file, "a_val.bin": file})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards_importers, "BLOCK_TOKENS", block)
        shards_importers.adopt(root, root / "out", small())
    shard = format.read(root / "out" / "train-00000", verify=True)
    assert shard.tokens.tolist() == [*ids, DOCUMENT]
    expected = {0} | {place for place, id in enumerate([*ids, DOCUMENT]) if id == DOCUMENT}
    assert shard.starts.tolist() == sorted(expected)


# --- 1386 ----------------------------------------------------------------------------------------------------------


def meta(**changes: object) -> bytes:
    facts = {
        "seq_len": 5,
        "pack_len": 6,
        "dtype": "uint16",
        "vocab_size": VOCAB,
        "tokenizer": "'some_1.1.model'",
        "has_loss_mask": "true",
        "template": "null",
        "n_train_sequences": 4,
        "n_val_sequences": 1,
        "n_train_shards": 2,
        "source_tokens": "",
    } | changes
    lines = [f"{key}: {value}".rstrip() for key, value in facts.items() if value is not None]
    return ("# made by hand\n" + "\n".join(lines) + "\n  web: 12\n  code: 3\n").encode()


def rows(root: Path, **changes: object) -> Path:
    first, second = (np.arange(start, start + 12, dtype="<u2") for start in (20, 40))
    first[3] = DOCUMENT
    held = np.array([DOCUMENT, 1, 2, 3, 4, 5], dtype="<u2")
    files = {
        "train_0000.bin": first.tobytes(),
        "train_0001.bin": second.tobytes(),
        "train_mask_0000.bin": bytes([0, 0, 1, 1, 1, 1] * 2),
        "train_mask_0001.bin": bytes([0, 1, 1, 1, 1, 0] * 2),
        "val_0000.bin": held.tobytes(),
        "val_mask_0000.bin": bytes([1] * 6),
        "meta.yaml": meta(**changes),
    }
    return folder_of(root, files)


def test_rows_of_1386_are_samples_as_they_are_and_their_masks_are_kept(tmp_path: Path) -> None:
    stats = shards_importers.adopt(rows(tmp_path / "theirs"), tmp_path / "out", small())
    assert stats["files"] == {"train": ["train_0000.bin", "train_0001.bin"], "val": ["val_0000.bin"]}
    samples = PackedDataset(tmp_path / "out", "train", 5, small().hash, verify=True)
    assert samples.num_samples == 4
    batch = samples.batch(np.arange(4))
    assert batch.ids[1].tolist() == [26, 27, 28, 29, 30]
    assert batch.targets[0].tolist() == [IGNORE, 22, DOCUMENT, 24, 25]
    assert batch.targets[2].tolist() == [41, 42, 43, 44, IGNORE]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(DataError, match="rows have 6 tokens, but 9 are needed"):
        PackedDataset(tmp_path / "out", "train", 8, small().hash)


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({}, "\ufeff"),
        ({"pack_len": "6  # a row", "has_loss_mask": "true # 1 is learned", "source_tokens": "# none"}, ""),
        ({"vocab_size": f'"{VOCAB}"', "seq_len": "'5' # one's 'less'", "n_train_shards": '"2"'}, ""),
        ({"dtype": '"uint16"  # "small"', "tokenizer": "some_1.1.model # it's its"}, ""),
    ],
)
def test_a_meta_yaml_may_have_comments_quotes_and_a_mark_of_its_encoding(
    tmp_path: Path, changes: dict[str, object], mark: str
) -> None:
    facts = [
        shards_importers.read_meta(rows(tmp_path / name, **some) / "meta.yaml")
        for name, some in (("a", {}), ("b", changes))
    ]
    assert facts[0] == facts[1]
    file = tmp_path / "b" / "meta.yaml"
    file.write_text(mark + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert shards_importers.read_meta(file) == facts[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 48000}, r"vocabulary of 48000, but this tokenizer has \d+ token IDs(.|\n)*'some_1.1.model'"),
        ({"pack_len": 5, "seq_len": 4}, r"train_0000.bin: holds 12 tokens, not a multiple of 5 a row"),
        ({"pack_len": "wide"}, r"meta.yaml: pack_len is 'wide', not a number"),
        ({"pack_len": "--5"}, r"meta.yaml: pack_len is '--5', not a number"),
        ({"dtype": "int16"}, r"meta.yaml: dtype is 'int16', not uint16 or uint32"),
        ({"vocab_size": VOCAB - 1}, rf"vocabulary of {VOCAB - 1}, but this tokenizer has {VOCAB} token IDs"),
        ({"n_train_sequences": 7}, r"meta.yaml: says n_train_sequences: 7, but there are 4"),
        ({"n_val_sequences": "many"}, r"meta.yaml: says n_val_sequences: 'many', but there are 1"),
        ({"n_train_shards": 3}, r"meta.yaml: says n_train_shards: 3, but there are 2"),
        ({"seq_len": 77}, r"meta.yaml: seq_len is 77, but pack_len is 6, not one more"),
        ({"has_loss_mask": None}, r"meta.yaml: lacks has_loss_mask, but train_mask_0000.bin exists"),
        ({"has_loss_mask": "false"}, r"meta.yaml: says has_loss_mask: false, but train_mask_0000.bin exists"),
        ({"has_loss_mask": "no"}, r"meta.yaml: has_loss_mask is 'no', not true or false"),
        ({"tokenizer": None, "what is this": 1}, r"meta.yaml:\d+: 'what is this: 1' is not a key and a value"),
    ],
)
def test_rows_that_are_not_as_their_meta_yaml_says_are_refused(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        shards_importers.adopt(rows(tmp_path / "theirs", **changes), tmp_path / "out", small())


def test_a_mask_of_another_length_and_a_meta_yaml_that_is_no_text_are_refused_by_name(tmp_path: Path) -> None:
    theirs = rows(tmp_path / "theirs")
    (theirs / "train_mask_0001.bin").write_bytes(bytes(11))
    with pytest.raises(DataError, match=r"train_mask_0001.bin: masks 11 tokens of 12\n.* Make it or fetch it again"):
        shards_importers.adopt(theirs, tmp_path / "out", small())
    (theirs / "meta.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"meta.yaml: is not UTF-8"):
        shards_importers.adopt(theirs, tmp_path / "out", small())


def test_rows_belong_to_a_tokenizer_of_their_size_before_or_after_special_tokens_were_added(tmp_path: Path) -> None:
    made = importers.load(small_file(tmp_path), "qwen2")
    theirs = made.document_id + 1  # the file has the token that ends texts, and none of the others
    accepted = set()
    for size in range(theirs - 2, made.vocab_size + 2):
        with suppress(DataError):
            shards_importers.adopt(
                rows(tmp_path / f"{size}", vocab_size=size), tmp_path / "out", made, document_id=DOCUMENT
            )
            accepted.add(size)
    assert accepted == {theirs - 1, theirs, made.vocab_size}


def test_the_name_of_the_tokenizer_is_compared_or_it_is_said_that_it_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = rows(tmp_path / "theirs")
    with pytest.raises(DataError, match=r"made with the tokenizer 'some_1.1.model', but this run has 'other.model'"):
        shards_importers.adopt(theirs, tmp_path / "out", small(), tokenizer_file="other.model")
    shards_importers.adopt(theirs, tmp_path / "out", small(), tokenizer_file="some_1.1.model")
    assert "IDs was compared" not in capsys.readouterr().err
    for name, told in (("gpt2-tokenizer", "is of 'gpt2-tokenizer'"), ("", "is of no imported file")):
        shards_importers.adopt(theirs, tmp_path / "out", small(), tokenizer_file=name)
        said = " ".join(capsys.readouterr().err.split())
        assert f"names the tokenizer 'some_1.1.model', and this run's {told}: only the number of token IDs was" in said


# --- what is refused -----------------------------------------------------------------------------------------------

OTHER_KINDS = {
    20240326: "a GPT-2 model",
    20240328: "a tokenizer",
    20240522: "an evaluation file",
    20240527: "a training state",
}

BROKEN: dict[str, tuple[Callable[[Path], bytes | None], str]] = {
    "torn": (lambda file: file.read_bytes()[:-1], r"has 1035 bytes, but 6 tokens need 1036"),
    "truncated by tokens": (lambda file: file.read_bytes()[:-4], r"has 1032 bytes, but 6 tokens need 1036"),
    "empty": (lambda file: b"", r"has 0 bytes, less than a header"),
    "foreign": (lambda file: b"\x80\x04" + bytes(2000), r"begins with 1152 and 0, which is no token file"),
    "another vocabulary": (
        lambda file: by_hand([DOCUMENT, 7, 50256]),
        rf"token 2 is 50256, outside the vocabulary of {VOCAB}",
    ),
    "a count that ran over": (
        lambda file: by_hand(LONG, count=2**31 - 1),
        r"has 1048 bytes, but 2147483647 tokens need",
    ),
    **{
        kind: (lambda file, magic=magic: by_hand(LONG, magic=magic), rf"begins with {magic} and 1, which is {kind}")  # type: ignore[misc]
        for magic, kind in OTHER_KINDS.items()
    },
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_shard_of_this_tokenizer_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    theirs = speed_run(tmp_path / "theirs")
    file = theirs / "fineweb_train_000002.bin"
    do, told = BROKEN[kind]
    file.write_bytes(do(file) or b"")
    with pytest.raises(DataError, match=f"{file}: {told}") as refused:
        shards_importers.adopt(theirs, tmp_path / "out", small())
    assert "stage" not in refused.value.hint


def test_files_in_which_no_document_ends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the token 3, which should separate documents, does not occur in train"):
        shards_importers.adopt(speed_run(tmp_path / "theirs"), tmp_path / "out", small(), document_id=3)


def test_a_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.bin files"):
        shards_importers.adopt(tmp_path, tmp_path / "out", small())
    with pytest.raises(DataError, match=r"nowhere: there is no such folder"):
        shards_importers.digest(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"is a file, not a folder"):
        shards_importers.digest(Path(__file__))
    theirs = folder_of(tmp_path / "a", {"some_train_1.bin": by_hand(LONG)})
    with pytest.raises(DataError, match="holds no file for val"):
        shards_importers.adopt(theirs, tmp_path / "out", small())
    (theirs / "other.bin").write_bytes(by_hand(LONG))
    with pytest.raises(DataError, match=r"other.bin: has neither train nor val in its name"):
        shards_importers.adopt(theirs, tmp_path / "out", small())


def test_a_file_without_tokens_adds_nothing(tmp_path: Path) -> None:
    files = {"0_train.bin": by_hand([]), "1_train.bin": by_hand([7, 8, DOCUMENT, 9]), "a_val.bin": by_hand(LONG)}
    stats = shards_importers.adopt(folder_of(tmp_path / "theirs", files), tmp_path / "out", small())
    assert (stats["tokens"], stats["documents"]) == (4, 2)
    (tmp_path / "theirs" / "1_train.bin").write_bytes(by_hand([]))
    with pytest.raises(DataError, match="holds no tokens for train"):
        shards_importers.adopt(tmp_path / "theirs", tmp_path / "out", small())


# --- beyond 2 GiB --------------------------------------------------------------------------------------------------


def sparse(file: Path, tokens: int, letter: str) -> None:
    """A shard of zeros that takes no room, but for its header and its last three tokens."""
    size = struct.calcsize(letter)
    magic, version = (20240520, 1) if letter == "H" else (20240801, 7)
    with file.open("wb") as opened:
        opened.write(by_hand([], magic=magic, version=version, count=tokens))
        opened.seek(1024 + size * (tokens - 3))
        opened.write(struct.pack(f"<3{letter}", DOCUMENT, 11, 12))


@pytest.mark.parametrize("letter", ["H", "I"])
def test_a_shard_of_more_than_two_gibibytes_is_read_to_its_last_token(tmp_path: Path, letter: str) -> None:
    tokens = 2**31 - 1
    file = tmp_path / "train-00000.bin"
    sparse(file, tokens, letter)
    assert file.stat().st_size > 2**31
    assert format.read_tokens(file)[-4:].tolist() == [0, DOCUMENT, 11, 12]
    facts = {"document_id": DOCUMENT, "layout": "stream", "tokenizer": small().hash, "sha256": {file.name: ""}}
    (tmp_path / "train-00000.json").write_text(str(facts | {"tokens": tokens, "starts": [0]}).replace("'", '"'))
    samples = PackedDataset(tmp_path, "train", 2, small().hash)
    assert samples.num_samples == (tokens - 1) // 2
    assert samples.batch(np.array([samples.num_samples - 1])).targets.tolist() == [[11, 12]]


def test_more_tokens_than_a_header_counts_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2,147,483,648 tokens are more than the header .* allows \(2,147,483,647\)"):
        format.write_pieces(tmp_path / "x", [], num_tokens=2**31, vocab_size=700, tokenizer_hash="a" * 64)
    file = tmp_path / "y.bin"
    file.write_bytes(by_hand([], count=5))
    with file.open("r+b") as opened:
        opened.truncate(1024 + 2 * (2**31 + 5))
    with pytest.raises(DataError, match=r"y\.bin: holds 2,147,483,653 tokens, more than its header allows"):
        format.read_tokens(file)


def test_what_has_no_header_and_more_tokens_than_one_counts_becomes_several_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = struct.pack(f"<{len(LONG)}H", *LONG)
    theirs = folder_of(tmp_path / "theirs", {"train.bin": raw, "val.bin": raw})
    monkeypatch.setattr(format, "MOST_TOKENS", 7)
    stats = shards_importers.adopt(theirs, tmp_path / "out", small(), headerless="uint16")
    assert (stats["tokens"], stats["files"]["train"]) == (len(LONG), ["train.bin"])
    shards = [format.read(path, verify=True) for path in format.names(tmp_path / "out", "train")]
    assert [shard.tokens.tolist() for shard in shards] == [LONG[:7], LONG[7:]]
    assert [shard.starts.tolist() for shard in shards] == [[0, 5], [0, 2]]
    shards_importers.adopt(rows(tmp_path / "rows"), tmp_path / "of rows", small())
    shards = [format.read(path, verify=True) for path in format.names(tmp_path / "of rows", "train")]
    assert [len(shard.tokens) for shard in shards] == [6] * 4
    assert [shard.mask.tolist() for shard in shards if shard.mask is not None][2] == [0, 1, 1, 1, 1, 0]


@pytest.mark.slow
def test_a_foreign_shard_of_more_than_two_gibibytes_is_taken_in(tmp_path: Path) -> None:
    theirs = folder_of(tmp_path / "theirs", {"a_val.bin": by_hand(LONG)})
    sparse(theirs / "a_train.bin", 2**30 + 10, "H")
    shards_importers.adopt(theirs, tmp_path / "out", small(), document_id=11)
    assert format.read(tmp_path / "out" / "train-00000", verify=True).starts.tolist() == [0, 2**30 + 8]
