import json
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.config import Between, Config, DiskPath, Temperature, build, written
from bloomery.core.errors import ConfigError
from bloomery.core.io import MAX_NAME_BYTES, MAX_PATH_BYTES, path_problem


class Set(Config):
    num_processes: Annotated[int, Between(1, 1024, "each rank is a process")] = 1
    rate: Annotated[float, Between(1e-12, 10, "more throws weights away")] = 1.0
    temperature: Temperature = 0.0
    path: DiskPath | None = None


def problem(**tree: object) -> str:
    with pytest.raises(ConfigError) as caught:
        build(Set, dict(tree), where="a.toml")
    return str(caught.value)


class Ends(Config):
    rate: Annotated[float, Between(1e-12, 10, "a larger one throws weights away", "a smaller one moves none")] = 1.0
    beta: Annotated[float, Between(0, 0.9999999, "a mean that keeps all never moves")] = 0.9
    steps: Annotated[int, Between(2, 10**6, "a deviation takes two, and all are in memory")] = 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rate", 0, "must be at least 1e-12, got 0.0: a smaller one moves none"),
        ("rate", 11, "must be at most 10, got 11.0: a larger one throws weights away"),
        ("beta", 1, "must be at most 0.9999999, got 1.0: a mean that keeps all never moves"),
        ("beta", -1, "must be at least 0, got -1.0"),
        ("steps", 2_000_000, "must be at most 1,000,000, got 2000000: a deviation takes two, and all are in memory"),
        ("steps", 1, "must be at least 2, got 1: a deviation takes two, and all are in memory"),
    ],
)
def test_each_end_says_its_own_reason_and_its_exact_number(name: str, value: float, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Ends, {name: value}, where="a.toml")
    assert str(caught.value) == f"a.toml: {name}: {said}"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_end_that_a_message_shows_is_the_end(end: float) -> None:
    assert float(written(end)) == end


@given(st.integers())
def test_a_whole_number_is_taken_exactly_within_its_ends(value: int) -> None:
    if 1 <= value <= 1024:
        assert build(Set, {"num_processes": value}).num_processes == value
    else:
        assert "num_processes: " in problem(num_processes=value)


@given(st.floats())
def test_a_float_is_taken_exactly_within_its_ends(value: float) -> None:
    if 1e-12 <= value <= 10:
        assert build(Set, {"rate": value}).rate == value
    else:
        assert problem(rate=value).startswith("a.toml: rate: ")


@pytest.mark.parametrize("value", [1e-320, 1e-308, 1e-4, -1.0, 101.0])
def test_a_temperature_is_zero_or_divides_without_overflow(value: float) -> None:
    assert "temperature: must be" in problem(temperature=value)
    assert build(Set, {"temperature": 0}).temperature == 0
    assert build(Set, {"temperature": 0.001}).temperature == 0.001


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("a" * 256, "at most 255 bytes, and one here has 256"),
        ("ä" * 128, "at most 255 bytes, and one here has 256"),
        ("folder/" + "a" * 10**5, "at most 255 bytes"),
        ("a/" * 3000, "at most 4,095 bytes"),
        ("a\0b", "holds no NUL"),
    ],
)
def test_a_path_that_no_file_system_takes_is_refused_and_not_repeated_in_full(path: str, says: str) -> None:
    said = problem(path=path)
    assert said.startswith("a.toml: path: ")
    assert says in said
    assert len(said) < 500


def test_the_longest_path_is_taken() -> None:
    path = "/".join(["n" * MAX_NAME_BYTES] * 15)
    assert build(Set, {"path": path}).path == Path(path)
    assert path_problem("a/" * (MAX_PATH_BYTES // 2) + "a") == ""


@pytest.mark.parametrize("value", ["\\ud800", "a\\udfffb"])
def test_half_a_surrogate_pair_is_no_text(value: str) -> None:
    assert "half a surrogate pair" in problem(path=json.loads(f'"{value}"'))
