"""Each preset against a small copy of its corpus: the same folders, files and columns, on the loopback."""

import io
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.config import build, packaged, plain
from bloomery.core.errors import ConfigError, DataError
from bloomery.data.readers.read import RejectedDocument
from bloomery.data.sources import local
from bloomery.data.sources.remote import PRESETS, PresetSource, SourcePresetName
from tests.data.hub_server import Hub
from tests.shared import SHARED, needs

SHAKESPEARE = SHARED / "data" / "text" / "tinyshakespeare.txt"
LONG = "A sentence that stands in a document which is long enough to be kept. " * 6
CODE = "\n".join(f"value_{number} = compute({number}, scale=2.5, offset={number})" for number in range(8))
COMMENTS = "\n".join(f"# a remark about number {number} that is no code" for number in range(9)) + "\nx = 1"


def parquet(*rows: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def web(score: float, text: str, number: int) -> dict[str, Any]:
    about = {"id": f"<urn:uuid:{number}>", "dump": "CC-MAIN-2024-10", "url": f"https://example.org/{number}"}
    return {"text": text, **about, "language": "en", "score": score, "int_score": round(score), "token_count": 80}


def answer(score: int, text: str) -> dict[str, Any]:
    return {"answer_id": 1, "author": "a", "pm_score": score, "selected": False, "text": text}


def asked(question: str, *answers: dict[str, Any]) -> dict[str, Any]:
    return {"qid": 1, "question": question, "answers": list(answers), "date": "2020/01/01", "metadata": ["https://x"]}


LAYOUTS: dict[str, dict[str, bytes]] = {
    "fineweb-edu": {
        "sample/10BT/000_00000.parquet": parquet(web(3.2, LONG, 1), web(2.9, LONG, 2), web(4.0, "Short.", 3)),
        "sample/100BT/000_00000.parquet": parquet(web(5.0, LONG, 4)),
        "data/CC-MAIN-2024-10/train-00000-of-00014.parquet": parquet(web(5.0, LONG, 5)),
    },
    "fineweb": {
        "sample/10BT/000_00000.parquet": parquet(web(0.0, LONG, 1), web(0.0, "Short.", 2)),
        "data/CC-MAIN-2024-10/000_00000.parquet": parquet(web(5.0, LONG, 5)),
    },
    "wikipedia": {
        "20231101.en/train-00000-of-00041.parquet": parquet(
            {"id": "12", "url": "https://en.wikipedia.org/wiki/Anarchism", "title": "Anarchism", "text": LONG},
            {"id": "13", "url": "https://en.wikipedia.org/wiki/Stub", "title": "Stub", "text": LONG[:250]},
        ),
        "20231101.de/train-00000-of-00020.parquet": parquet({"id": "1", "url": "u", "title": "t", "text": LONG}),
    },
    "stackexchange": {
        "data/cooking.stackexchange.com/train-00000-of-00001.parquet": parquet(
            asked(
                "<p>How long do I boil an <em>egg</em> so that it is soft inside?</p>",
                answer(0, "<p>No idea.</p>"),
                answer(3, "<p>Six minutes from cold water.</p>\n<pre><code>timer 6m\nstop\n</code></pre>"),
                answer(1, "<p>Until it is done.</p>"),
            ),
            asked(f"<p>{LONG}</p>", answer(0, f"<p>{LONG}</p>"), answer(-1, "<p>Worse.</p>")),
        ),
    },
    "starcoder": {
        "python/train-00000-of-00059.parquet": parquet(
            *(
                {"max_stars_repo_path": "a.py", "max_stars_repo_name": "a/b", "max_stars_count": 1, "id": str(n)}
                | {"content": text}
                for n, text in enumerate([CODE, "x = 1\n" * 3, COMMENTS, "a = 1\n" * 5 + "y" * 501, CODE * 150])
            )
        ),
        "rust/train-00000-of-00021.parquet": parquet({"id": "9", "content": CODE}),
    },
    "arxiv": {
        "data/train-00000-of-00004.parquet": parquet({"text": LONG, "label": 3}, {"text": "Short.", "label": 1}),
        "data/test-00000-of-00001.parquet": parquet({"text": LONG, "label": 3}),
        "no_ref/train-00000-of-00004.parquet": parquet({"text": LONG, "label": 3}),
    },
    "finemath": {
        "finemath-4plus/train-00000-of-00064.parquet": parquet({"text": LONG, "url": "https://example.org"}),
        "finemath-3plus/train-00000-of-00128.parquet": parquet({"text": LONG + "3", "url": "https://example.org"}),
    },
    "cosmopedia": {
        "data/stories/train-00000-of-00043.parquet": parquet({"prompt": "Write", "text": LONG, "audience": "all"}),
        "data/khanacademy/train-00000-of-00001.parquet": parquet({"prompt": "Write", "text": LONG + "k"}),
    },
    "tinystories": {
        "data/train-00000-of-00004-2d5a1467fff1081b.parquet": parquet({"text": "Once upon a time."}),
        "data/validation-00000-of-00001-869c898b519ad725.parquet": parquet({"text": "Held out."}),
        "TinyStories-train.txt": b"Once upon a time.\n<|endoftext|>\n",
    },
}
KEPT: dict[str, list[str]] = {
    "fineweb-edu": [LONG],
    "fineweb": [LONG],
    "wikipedia": [LONG],
    "starcoder": [CODE],
    "arxiv": [LONG],
    "finemath": [LONG],
    "cosmopedia": [LONG, LONG + "k"],
    "tinystories": ["Once upon a time."],
}
DROPPED: dict[str, list[str]] = {
    "fineweb-edu": ["accept.score", "accept.characters"],
    "fineweb": ["accept.characters"],
    "wikipedia": ["accept.characters"],
    "stackexchange": ["accept.answers.pm_score"],
    "starcoder": ["accept.characters", "accept.code_lines", "accept.longest_line", "accept.characters"],
    "arxiv": ["accept.characters"],
}


def preset(name: str, **more: Any) -> PresetSource:
    return build(PresetSource, {"kind": "preset", "name": name, **more})


def read(hub: Hub, name: str, **more: Any) -> tuple[list[str], list[str]]:
    """Texts that are kept, and reasons of what is not."""
    hub.put(packaged(PRESETS)[name]["dataset"], LAYOUTS[name])
    found = list(local.read(preset(name, **more)))
    kept = [item["text"] for item in found if not isinstance(item, RejectedDocument)]
    return kept, [item.problem.reason for item in found if isinstance(item, RejectedDocument)]


@pytest.mark.parametrize("name", KEPT)
def test_a_preset_reads_the_fields_and_keeps_to_the_limits_of_its_corpus(hub: Hub, name: str) -> None:
    kept, dropped = read(hub, name)
    assert sorted(kept) == sorted(KEPT[name])
    assert dropped == DROPPED.get(name, [])


def test_of_answers_the_best_is_taken_and_its_markup_becomes_text(hub: Hub) -> None:
    (text,), dropped = read(hub, "stackexchange")
    assert dropped == DROPPED["stackexchange"]
    assert text.startswith("Question: How long do I boil an egg so that it is soft inside?\n\nAnswer: Six minutes")
    assert "timer 6m\nstop" in text
    assert "<" not in text


@needs(SHAKESPEARE)
def test_shakespeare_comes_by_its_address(hub: Hub) -> None:
    text = SHAKESPEARE.read_bytes()
    hub.plain["/input.txt"] = text
    (found,) = local.read(preset("tinyshakespeare", address=f"{hub.endpoint}/input.txt"))
    assert not isinstance(found, RejectedDocument)
    assert found["text"].encode() == text
    assert found["license"] == "public domain"


def test_bytes_that_are_not_shakespeares_are_refused(hub: Hub) -> None:
    hub.plain["/input.txt"] = b"To be, or not."
    with pytest.raises(DataError, match="expected 86c4e6aa"):
        list(local.read(preset("tinyshakespeare", address=f"{hub.endpoint}/input.txt")))


def test_every_name_has_a_preset_with_a_license_and_a_domain() -> None:
    assert set(get_args(SourcePresetName)) == set(packaged(PRESETS))
    for name in packaged(PRESETS):
        assert preset(name).license
        assert preset(name).domain
        assert preset(name).name == name


def test_what_a_recipe_says_goes_before_the_preset(hub: Hub) -> None:
    other = preset("mine", preset="starcoder", files=["rust/*.parquet"], domain="rust", max_documents=1)
    assert (other.dataset, other.files, other.domain) == ("bigcode/starcoderdata", ("rust/*.parquet",), "rust")
    assert other.accept == preset("starcoder").accept
    assert preset("wikipedia", config="20231101.de").files == ()
    assert read(hub, "fineweb-edu", accept=[]) == ([LONG, LONG, "Short."], [])


def test_a_resolved_preset_is_its_own_recipe() -> None:
    for name in packaged(PRESETS):
        assert build(PresetSource, plain(preset(name))) == preset(name)


def test_an_unknown_preset_and_a_wrong_key_are_named() -> None:
    with pytest.raises(ConfigError, match="no preset 'fineweb2'; presets: fineweb-edu"):
        preset("fineweb2")
    with pytest.raises(ConfigError, match="max_byte"):
        preset("fineweb", max_byte=3)


def test_a_gated_preset_says_where_its_terms_are(hub: Hub) -> None:
    hub.put("bigcode/starcoderdata", LAYOUTS["starcoder"])
    hub.datasets["bigcode/starcoderdata"].gated = True
    with pytest.raises(DataError, match=r"Accept its terms at .*/datasets/bigcode/starcoderdata"):
        list(local.read(preset("starcoder")))
