"""What an attempt that died has left is used again as it was saved, or not at all."""

import math
from contextlib import suppress
from pathlib import Path

import pytest

from bloomery.core import io as core_io
from bloomery.core import records
from bloomery.core.errors import RunError


def saved(folder: Path) -> Path:
    (folder / "a.txt").write_text("abc")
    records.save(folder / "done.json", {"count": 3, "loss": math.nan}, core_io.listed(folder, ["a.txt"]))
    return folder / "done.json"


def test_what_was_saved_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert records.load(tmp_path / "done.json", tmp_path, "counting") is None
    assert records.load(saved(tmp_path), tmp_path, "counting") == {"count": 3, "loss": "nan"}
    assert capsys.readouterr().err == ""


def test_no_changed_bit_of_a_record_is_believed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    record = records.load(path, tmp_path, "counting")
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = None
        with suppress(RunError):  # it holds no JSON any more
            found = records.load(path, tmp_path, "counting")
        assert found in (None, record)


@pytest.mark.parametrize(("text", "told"), [("abd", "has another sha256"), ("ab", "has 2 bytes"), (None, "is gone")])
def test_a_changed_file_is_named_and_its_work_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, told: str
) -> None:
    path = saved(tmp_path)
    (tmp_path / "a.txt").unlink()
    if text is not None:
        (tmp_path / "a.txt").write_text(text)
    assert records.load(path, tmp_path, "counting") is None
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("counting runs again, because ")
    assert told in said


@pytest.mark.parametrize("key", ["record", "outputs", "sha256"])
def test_a_record_that_lacks_a_key_is_none(tmp_path: Path, key: str) -> None:
    path = saved(tmp_path)
    core_io.write_json(path, {name: value for name, value in core_io.read_json(path).items() if name != key})
    assert records.load(path, tmp_path, "counting") is None
