"""The tokenizer of a folder of another model has the IDs that transformers gives, whichever files say it."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from bloomery.core.errors import DataError
from bloomery.tokenizer import importers
from bloomery.tokenizer.tokenizer import Tokenizer, byte_letters
from tests.weights.test_hf import spelled

TEXTS = ("abc 12345", "hi!\n\nhi", " hi  hi\thi", "Über 1 e\u0301tage", "<|im_start|>user\nhi<|im_end|>\n")
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def listed(tokens: dict[str, int], **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {str(id): {"content": token, **usual, **flags} for token, id in tokens.items()}


def two_files(folder: Path, **config: Any) -> int:
    """vocab.json and merges.txt, as a tokenizer without tokenizer.json leaves them. Returns their number of tokens."""
    vocab = {letter: id for id, letter in enumerate(byte_letters().values())}
    merges = [("1", "2"), ("12", "3"), ("h", "i"), ("Ġ", "hi"), ("!", "Ċ")]
    vocab |= {left + right: len(vocab) + place for place, (left, right) in enumerate(merges)}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    kind = str(config.get("tokenizer_class", "")).removesuffix("Tokenizer").lower()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))  # goes before the class in transformers
    return len(vocab)


def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def recognized(tokenizer: Tokenizer, text: str) -> list[int]:
    """The IDs of a text in which special tokens are recognized."""
    return tokenizer.recognizing().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_two_files_give_the_ids_of_transformers_by_its_class(tmp_path: Path, name: str) -> None:
    size = two_files(tmp_path, tokenizer_class=name)
    added = {token: size + place for place, token in enumerate(TOKENS)}
    settings = {"tokenizer_class": name, "eos_token": TOKENS[2], "unk_token": TOKENS[0]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": listed(added)}))
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    found, expected = importers.load_foreign(tmp_path), theirs(tmp_path)
    for text in TEXTS:
        assert recognized(found, text) == expected.encode(text, add_special_tokens=False), text
    assert found.end_id == size + 2
    assert not set(found.encode(TEXTS[-1])) & found.special_ids


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"tokenizer_class": "DebertaTokenizer"}, "is of the class DebertaTokenizer, which is read only from a"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "puts a space before each text"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"tokenizer_config\.json: cannot be read: added_tokens_"),
        ({"added_tokens_decoder": {"0": "x"}}, r"tokenizer_config\.json: cannot be read: added_tokens_decoder\.0"),
        ({"added_tokens_decoder": {"400": {"content": "a new one"}}}, "'a new one' the ID 400, which is not the next"),
    ],
)
def test_two_files_of_what_is_not_known_are_refused(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    two_files(tmp_path, **config)
    with pytest.raises(DataError, match=why):
        importers.load_foreign(tmp_path)


def test_tokens_that_only_the_configuration_lists_are_added_as_transformers_does(tmp_path: Path) -> None:
    two_files(tmp_path, tokenizer_class="GPT2Tokenizer")
    plain = theirs(tmp_path)
    plain.save_pretrained(str(tmp_path))
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink()
    size = len(plain)
    added = {token: size + place for place, token in enumerate(TOKENS[1:])}
    decoder = listed({"hi": plain.convert_tokens_to_ids("hi")}, special=False) | listed(added, rstrip=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TOKENS[2], "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = importers.load_foreign(tmp_path)
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert recognized(found, text) == expected.encode(text, add_special_tokens=False), text
    assert found.end_id == expected.eos_token_id == size + 1
    decoder[str(size)] = {"content": "<|far|>"}
    decoder[str(size + 9)] = decoder.pop(str(size))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": decoder}))
    with pytest.raises(DataError, match="which is not the next one"):
        importers.load_foreign(tmp_path)


@pytest.mark.parametrize("legacy", [True, False, None])
def test_a_sentencepiece_model_puts_spaces_after_special_tokens_as_its_configuration_says(
    tmp_path: Path, legacy: bool | None
) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    (tmp_path / "tokenizer.model").write_bytes(spelled(pieces, [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1]))
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    known = {} if legacy is None else {"legacy": legacy}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | known))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = importers.load_foreign(tmp_path)
    after = [pieces.index("a")] if legacy is False else [pieces.index("\u2581a")]
    assert recognized(found, "a</s>a") == [pieces.index("\u2581a"), pieces.index("</s>"), *after]
    if legacy is not None:
        assert recognized(found, "a</s>a b") == theirs(tmp_path).encode("a</s>a b", add_special_tokens=False)
