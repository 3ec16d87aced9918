"""Text without spaces between words: what of it counts as a word, and that tasks are found in it."""

import json
import random
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bloomery.data.decontamination import WORD, OverlapIndex, OverlapSettings, hits, plain
from bloomery.data.dedup import hashing

QUESTIONS = [
    "水在标准大气压下的沸点是多少摄氏度？",
    "下列哪一位科学家首先提出了万有引力定律并发表了相关著作？",
    "日本で一番高い山は何という名前ですか。",
    "光合成の過程で植物が放出する気体はどれでしょうか。",
    "カタカナのパソコンとインターネットの違いは何ですか",
    "ดาวเคราะห์ดวงใดที่อยู่ใกล้ดวงอาทิตย์มากที่สุดในระบบสุริยะ",
    "น้ำเดือดที่อุณหภูมิกี่องศาเซลเซียส",
    "ປະເທດລາວມີນະຄອນຫຼວງຊື່ວ່າຫຍັງແລະຕັ້ງຢູ່ໃສ",
    "ប្រទេសកម្ពុជាមានរាជធានីឈ្មោះអ្វីហើយស្ថិតនៅឯណា",
    "在Python 3中，如何用一行代码反转一个列表list？",
]


def index_of(rows: list[dict[str, Any]], folder: Path, **more: int) -> OverlapIndex:
    path = folder / "quiz.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return OverlapIndex.of(OverlapSettings(files=(path,), **more))  # type: ignore[arg-type]


def rows_in(index: OverlapIndex, text: str) -> set[int]:
    return {index.rows[match.row][1] for match in index.find([text])}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> OverlapIndex:
    return index_of([{"question": question} for question in QUESTIONS], tmp_path_factory.mktemp("tasks"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("你好，世界。", "你 好 世 界"),
        ("ﾊﾟｿｺﾝとｶﾅ", "パ ソ コ ン と カ ナ"),
        ("か\u3099き", "が き"),
        ("㍿東京2024年", "株 式 会 社 東 京 2024 年"),
        ("เที่ยวน้ำใส", "เท ย ว นา ใส"),
        ("ภาษา\u200bไทย ๒๕๖๐", "ภา ษา ไท ย ๒ ๕ ๖ ๐"),
        ("한국어는 띄어쓰기를 한다", "한국어는 띄어쓰기를 한다"),
        ("naïve Straße", "naïve strasse"),
    ],
)
def test_each_ideograph_kana_and_cluster_is_a_word(text: str, words: str) -> None:
    assert WORD.findall(plain(text)) == words.split()


def test_no_word_reaches_from_one_piece_to_the_next() -> None:
    rng = random.Random(0)
    low = [(0x20, 0x7E), (0xA0, 0x17F), (0x300, 0x33F), (0xE00, 0xEFF), (0x1000, 0x109F), (0x1780, 0x17FF)]
    blocks = [*low, (0x2E80, 0x33FF), (0x4E00, 0x4E40), (0xAC00, 0xAC20), (0x200B, 0x200F), (0xFF00, 0xFFEF)]
    for _ in range(4000):
        some = rng.sample(blocks, 3)
        text = "".join(chr(rng.randint(*rng.choice(some))) for _ in range(rng.randrange(1, 10)))
        pieces = [WORD.findall(plain(piece[0])) for piece in hashing.PIECE.finditer(text)]
        assert len(WORD.findall(plain(text))) == sum(map(len, pieces)), ascii(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "前文。" + text + "后文。",
        lambda text: re.sub(r"([\u3041-\u9fff])", r"\1\n", text),
        lambda text: text[:7] + "\r\n\r\n  " + text[7:],
        lambda text: "「" + text.replace("，", " ").strip("。？") + "」",
        str.upper,
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: unicodedata.normalize("NFKD", text),
        lambda text: text[:5] + "\u200b" + text[5:],
        lambda text: text.replace("中", "**中**"),
        lambda text: "abc " * 100 + text + " xyz" * 100,
    ],
)
def test_a_question_without_spaces_is_found_in_any_dress(index: OverlapIndex, change: Callable[[str], str]) -> None:
    for number, question in enumerate(QUESTIONS, 1):
        assert rows_in(index, change(question)) == {number}, question


def test_thirteen_characters_in_a_row_tell_and_twelve_do_not(index: OverlapIndex) -> None:
    question = QUESTIONS[1]
    assert rows_in(index, "据说" + question[5:18] + "吗") == {2}
    assert rows_in(index, "据说" + question[5:17] + "吗") == set()
    assert rows_in(index, "水的沸点在标准大气压下是一百摄氏度，万有引力定律由牛顿提出。") == set()


def test_two_hundred_planted_questions_are_found_and_clean_pages_stay(tmp_path: Path) -> None:
    rng = random.Random(1)
    characters = [chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(2500)]

    def sentence(length: int) -> str:
        return "".join(rng.choices(characters, k=length)) + rng.choice("。？！")

    questions = [sentence(rng.randrange(8, 60)) for _ in range(200)]
    index = index_of([{"question": one} for one in questions], tmp_path)
    for number, question in enumerate(questions, 1):
        place = rng.randrange(1, len(question))
        broken = question[:place] + rng.choice(["\n", "，", "\u3000", " … "]) + question[place:]
        page = "".join(sentence(rng.randrange(5, 40)) for _ in range(8))
        assert number in rows_in(index, page + broken + page)
        assert rows_in(index, page) == set()


def test_a_short_question_without_spaces_is_found_with_its_choices_only(tmp_path: Path) -> None:
    rows = [
        {"Question": "中国首都", "A": "上海", "B": "北京", "C": "广州", "D": "深圳", "Answer": "B"},
        {"question": "中国的首都是哪里？"},
    ]
    index = index_of(rows, tmp_path)
    assert rows_in(index, "中国首都的人口很多，上海也是。") == set()
    assert rows_in(index, "中国首都？A。上海") == set()
    assert rows_in(index, "题目：中国首都：上海、北京、广州、深圳。") == {1}
    assert rows_in(index, "请问中国的首都是哪里") == {2}
    assert rows_in(index_of(rows, tmp_path, min_question_words=2), "中国首都的人口很多。") == {1}


def test_a_question_of_few_words_is_found_with_its_choices_or_alone_where_that_is_asked(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "The pleura", "choices": ["lines the lung", "is a bone"], "answer": 0},
        {"question": "Photosynthesis", "choices": ["makes sugar in a green leaf", "none"], "gold": 0},
        {"question": "Why now?", "answer": "nobody knows"},
    ]
    page = "Chapter 3. {} And so on it goes."
    index = index_of(rows, tmp_path)
    assert rows_in(index, page.format("The PLEURA\nlines the lung!")) == {1}
    assert rows_in(index, page.format("the pleura: lines the lung; is a bone")) == {1}
    assert rows_in(index, page.format("Photosynthesis makes sugar in a green leaf.")) == {2}
    for text in ("The pleura is thin.", "Photosynthesis is old.", "Why now?"):
        assert rows_in(index, page.format(text)) == set()
    assert rows_in(index_of(rows, tmp_path, min_question_words=2), page.format("The pleura! Why now?")) == {1, 3}
    assert rows_in(index_of(rows, tmp_path, min_question_words=1), page.format("photosynthesis")) == {2}


def test_a_hit_without_spaces_is_the_question_and_not_the_page(index: OverlapIndex) -> None:
    page = "前文，" * 50 + QUESTIONS[0] + "后文。" * 50
    batch = pa.record_batch({"id": ["zh", "th"], "text": [page, "คำถาม " + QUESTIONS[6] + " จบ"]})
    worst, listed = hits(index, batch)
    assert set(worst) == {0, 1}
    assert [(hit["row"], hit["place"], hit["matched"]) for hit in listed] == [
        (1, 150, QUESTIONS[0][:13]),
        (7, 6, QUESTIONS[6]),
    ]
