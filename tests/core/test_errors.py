import io

import pytest

from bloomery.core import errors
from bloomery.core.errors import BloomeryError, shorten


@pytest.mark.parametrize("kind", ["ConfigError", "DataError", "CheckpointError", "HardwareError", "RunError"])
def test_an_error_says_where_what_and_what_to_do(kind: str) -> None:
    made = getattr(errors, kind)
    assert issubclass(made, BloomeryError)
    assert str(made("is torn", where="a.bin", hint="Make it again.")) == "a.bin: is torn\nMake it again."
    assert str(made("is torn", hint="Make it again.")) == "is torn\nMake it again."
    assert str(made("is torn")) == "is torn"


@pytest.mark.parametrize("value", ["a" * 10**5, "word " * 10**4, "/" * 10**5, "a\n" * 10**5, "ä" * 10**5])
def test_a_message_is_bounded_whatever_value_it_repeats(value: str) -> None:
    for error in (BloomeryError(value), BloomeryError("is wrong", where=value, hint=value)):
        assert len(str(error)) < 2 * errors.MAX_MESSAGE_CHARS + 200
        assert len(error.what) < errors.MAX_MESSAGE_CHARS + 100


def test_a_long_run_of_characters_keeps_its_two_ends_and_loses_its_middle() -> None:
    assert str(BloomeryError("x" * 100_000 + " is wrong")) == (
        "x" * 150 + " … [99,800 characters left out] … " + "x" * 50 + " is wrong"
    )


def test_the_longest_path_and_a_long_list_stay_whole_in_a_message() -> None:
    path = "/" + "/".join(["n" * 255] * 15)
    listing = "\n".join(f"documents/{number:06}.jsonl is missing" for number in range(400))
    assert str(BloomeryError("no such file", where=path)) == f"{path}: no such file"
    assert str(BloomeryError(listing)) == listing


def test_a_shortened_value_is_at_most_as_long_as_was_asked_for_beside_the_count() -> None:
    assert shorten("short") == "short"
    assert shorten(7) == "7"
    assert shorten("a" * 1000, 20) == "a" * 15 + " … [980 characters left out] … " + "a" * 5


def test_values_that_python_refuses_to_write_are_shown_all_the_same() -> None:
    assert shorten(10**5000) == "an integer of about 5,000 digits"
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shorten(deep) == "a list that is too deep or too long to be shown"
    while deep:  # Python would end on freeing it at once
        deep = deep.pop()  # type: ignore[assignment]
    assert "too long to be shown" in shorten({"a": 10**5000})


def test_a_long_value_in_quotes_is_shortened_and_what_stands_around_it_is_whole() -> None:
    repeated = "false " * 900
    shown = str(BloomeryError(f"has_loss_mask is {repeated!r}, not true or false", where="rows/meta.yaml"))
    assert len(shown) < 400
    assert shown.startswith("rows/meta.yaml: has_loss_mask is 'false false")
    assert shown.endswith("', not true or false")
    names = "there are " + ", ".join(f"'{number}'" for number in range(300))
    assert str(BloomeryError(names)) == names


def test_what_a_terminal_would_obey_is_shown_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.readable("a\x1b[2J\r\x9b\x7f\tb\nä\udcff") == "a\\x1b[2J\\x0d\\x9b\\x7f\tb\nä\\udcff"
    errors.tell("\x1b[2Jesc.jsonl")
    assert capsys.readouterr().err == "\\x1b[2Jesc.jsonl\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_obeys_nothing_that_is_printed_and_a_file_gets_every_byte(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", out)
    with errors.checked_output():
        print("an answer \x1b[2J")
    assert out.getvalue() == ("an answer \\x1b[2J\n" if is_terminal else "an answer \x1b[2J\n")
