import json
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from bloomery.core.config import VOLATILE, Between, Config, Share, apply_override, build, load, plain, to_toml
from bloomery.core.errors import ConfigError

Positive = Annotated[int, Between(1, 2**63 - 1, "a test has no more")]


class Short(Config):
    kind: Literal["short"] = "short"
    min_words: Positive = 10
    note: str = ""


class Clean(Config):
    kind: Literal["clean", "tidy"] = "clean"
    patterns: tuple[str, ...] = ()
    limit: float | None = None
    threads: Positive = Field(1, json_schema_extra=VOLATILE)


Rule = Annotated[Short | Clean, Field(discriminator="kind")]


class Deep(Config):
    value: int = 0
    cache: str = Field("here", json_schema_extra=VOLATILE)


class Work(Config):
    path: Path | None = None
    rate: float = 1e-3
    share: Share = 0.5
    shuffle: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    grid: tuple[tuple[int, ...], ...] = ()
    rules: tuple[Rule, ...] = ()
    extra: tuple[Deep, ...] | None = None
    workers: Positive = Field(1, json_schema_extra=VOLATILE)
    place: Deep = Field(Deep(), json_schema_extra=VOLATILE)

    @model_validator(mode="after")
    def _betas_ascend(self) -> "Work":
        if self.betas[0] > self.betas[1]:
            raise ValueError(f"Betas ascend; got {self.betas}")
        return self


class Recipe(Config):
    name: str
    steps: int = 1
    first: Rule = Short()
    maybe: Rule | None = None
    work: Work = Work()
    deep: tuple[Deep, ...] = ()


def problem(tree: dict[str, Any]) -> str:
    """What a person is told of a wrong recipe."""
    with pytest.raises(ConfigError) as caught:
        build(Recipe, {"name": "a", **tree}, where="a.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("tree", "key", "hint"),
    [
        ({"stps": 3}, "stps", "Did you mean 'steps'?"),
        ({"work": {"shufle": 3}}, "work.shufle", "Did you mean 'shuffle'?"),
        ({"first": {"kind": "short", "min_wordz": 3}}, "first.min_wordz", "Did you mean 'min_words'?"),
        ({"maybe": {"kind": "tidy", "patterms": []}}, "maybe.patterms", "Did you mean 'patterns'?"),
        ({"work": {"rules": [{"kind": "short"}, {"kind": "clean", "limits": 1}]}}, "work.rules.1.limits", "'limit'"),
        ({"deep": [{}, {"valu": 1}]}, "deep.1.valu", "Did you mean 'value'?"),
        ({"work": {"extra": [{"cahce": "x"}]}}, "work.extra.0.cahce", "Did you mean 'cache'?"),
        ({"deep": [{"zzz": 1}]}, "deep.0.zzz", "Known keys here: cache, value."),
        ({"first": {"kind": "short", "zzz": 1}}, "first.zzz", "Known keys here: kind, min_words, note."),
    ],
)
def test_an_unknown_key_is_named_with_its_place_and_the_key_that_was_meant(
    tree: dict[str, Any], key: str, hint: str
) -> None:
    what, said = problem(tree).split("\n")
    assert what == f"a.toml: {key}: unknown key"
    assert hint in said


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        (
            {"first": {"kind": "shrot"}},
            "first.kind: 'shrot' is not one of 'short', 'clean', 'tidy'\nDid you mean 'sh",
        ),
        ({"work": {"rules": [{"kind": 3}]}}, "work.rules.0.kind: '3' is not one of 'short', 'clean', 'tidy'"),
        ({"work": {"rules": [{"min_words": 3}]}}, "work.rules.0.kind: is required: it says which one is meant"),
        (
            {"maybe": {}},
            "maybe.kind: is required: it says which one is meant\nKinds: 'short', 'clean', 'tidy'.",
        ),
        ({"steps": "8"}, "steps: input should be a valid integer, got '8'"),
        ({"steps": True}, "steps: input should be a valid integer, got True"),
        ({"steps": 8.0}, "steps: input should be a valid integer, got 8.0"),
        ({"work": {"rate": "8"}}, "work.rate: input should be a valid number, got '8'"),
        ({"work": {"rate": math.nan}}, "work.rate: input should be a finite number, got nan"),
        ({"work": {"share": 1.5}}, "work.share: must be at most 1, got 1.5: it is a share"),
        ({"work": {"shuffle": 1}}, "work.shuffle: input should be a valid boolean, got 1"),
        ({"work": {"betas": [0.1]}}, "work.betas"),
        ({"work": {"betas": [0.1, "x"]}}, "work.betas.1: input should be a valid number, got 'x'"),
        ({"work": {"betas": [0.3, 0.2]}}, "work: betas ascend; got (0.3, 0.2)"),
        ({"name": 3}, "name: input should be a valid string, got 3"),
        (
            {"work": {"rules": [{"kind": "short", "min_words": 0}]}},
            "work.rules.0.min_words: must be at least 1, got 0",
        ),
        ({"work": []}, "work: "),
    ],
)
def test_a_wrong_value_is_named_with_its_place(tree: dict[str, Any], told: str) -> None:
    assert problem(tree).startswith(f"a.toml: {told}")


def test_every_wrong_key_is_told_at_once_and_a_missing_one_is_required() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Recipe, {"steps": "x", "wrok": {}})
    assert caught.value.what.split("\n") == [
        "name: is required",
        "steps: input should be a valid integer, got 'x'",
        "wrok: unknown key",
    ]
    assert caught.value.hint == "Did you mean 'work'?"
    many = build_problem({f"k{number}": 1 for number in range(9)})
    assert many.what.endswith("… and 5 more")


def build_problem(tree: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(Recipe, tree)
    return caught.value


def test_only_what_loses_nothing_is_converted() -> None:
    made = build(Recipe, {"name": "a", "work": {"rate": 3, "path": "x/y", "betas": [0, 1], "grid": [[1], [2, 3], []]}})
    assert made.work.rate == 3.0
    assert isinstance(made.work.rate, float)
    assert made.work.path == Path("x/y")
    assert made.work.betas == (0.0, 1.0)
    assert made.work.grid == ((1,), (2, 3), ())


def test_a_recipe_cannot_be_changed() -> None:
    made = build(Recipe, {"name": "a"})
    with pytest.raises(ValidationError, match="frozen"):
        made.steps = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        made.work.rate = 3.0  # type: ignore[misc]


def test_a_recipe_may_begin_with_a_byte_order_mark_and_have_line_ends_of_windows(tmp_path: Path) -> None:
    (path := tmp_path / "recipe.toml").write_bytes(b'\xef\xbb\xbfname = "a"\r\nsteps = 3\r\n')
    assert load(Recipe, path) == Recipe(name="a", steps=3)


def test_a_file_that_is_no_recipe_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('name = "a"')
    (tmp_path / "bad.toml").write_text("name = = 3")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\n')
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match=r"(?s)none\.toml: no such recipe\nRecipes in that folder: good\.toml\.$"):
        load(Recipe, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"Recipes in that folder: none\.$"):
        load(Recipe, tmp_path / "folder.toml" / "none.toml")
    with pytest.raises(ConfigError, match=r"bad\.toml: .*line 1"):
        load(Recipe, tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"latin\.toml: cannot be read"):
        load(Recipe, tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Recipe, tmp_path)


# --- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("steps=100", ("steps",), 100),
        (" steps = 100", ("steps",), 100),
        ("name=tiny", ("name",), "tiny"),
        ("name = two words ", ("name",), "two words"),
        ("name='1'", ("name",), "1"),
        ("name=a=b", ("name",), "a=b"),
        ("name=", ("name",), ""),
        ("work.rate=3e-4", ("work", "rate"), 3e-4),
        ("work.shuffle=false", ("work", "shuffle"), False),
        ("work.betas=[0.5, 0.75]", ("work", "betas"), (0.5, 0.75)),
        ("work.betas.1=0.99", ("work", "betas", 1), 0.99),
        ("work.grid.0.1=7", ("work", "grid", 0, 1), 7),
        ("work.rules.1.limit=0.5", ("work", "rules", 1, "limit"), 0.5),
        ('work.rules=[{kind = "tidy"}]', ("work", "rules", 0, "kind"), "tidy"),
        ("deep.0={value = 3}", ("deep", 0, "value"), 3),
        ("work.place.value=4", ("work", "place", "value"), 4),
    ],
)
def test_an_override_sets_what_its_path_names(
    tmp_path: Path, override: str, path: tuple[str | int, ...], value: object
) -> None:
    (tmp_path / "a.toml").write_text(
        'name = "a"\n[work]\nbetas = [0.9, 0.95]\ngrid = [[1, 2]]\n'
        '[[work.rules]]\nkind = "short"\n[[work.rules]]\nkind = "clean"\n[[deep]]\n'
    )
    found: Any = load(Recipe, tmp_path / "a.toml", [override])
    for part in path:
        found = found[part] if isinstance(part, int) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("steps", "expected key=value, got 'steps'"),
        ("=3", "expected key=value, got '=3'"),
        ("name.x=3", "name: is 'a', which has no keys of its own"),
        ("grid.0.0.x=3", "grid.0.0: is 1, which has no keys of its own"),
        ("grid.1.0=3", "grid.1: '1' is not an index of an array of 1"),
        ("grid.0.9=3", "grid.0.9: '9' is not an index of an array of 2"),
        ("grid.-1=3", "grid.-1: '-1' is not an index of an array of 1"),
        ("grid.²=3", "grid.²: '²' is not an index of an array of 1"),
        ("grid.x.y=3", "grid.x: 'x' is not an index of an array of 1"),
    ],
)
def test_an_override_that_reaches_nowhere_is_an_error(override: str, told: str) -> None:
    tree = {"name": "a", "grid": [[1, 2]]}
    with pytest.raises(ConfigError) as caught:
        apply_override(tree, override)
    assert str(caught.value).startswith(told)
    assert tree == {"name": "a", "grid": [[1, 2]]}


class Inner(Config):
    best: Rule = Clean(limit=0.25)
    deep: Deep = Deep(value=3, cache="there")


class Outer(Config):
    rule: Rule = Clean(limit=0.5, patterns=("a",))
    inner: Inner = Inner(best=Clean(limit=0.75), deep=Deep(value=4))
    listed: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    ("text", "overrides", "changed"),
    [
        ("", ["rule.threads=2"], {"rule": Clean(limit=0.5, patterns=("a",), threads=2)}),
        ("", ["rule.kind=clean", "rule.threads=2"], {"rule": Clean(limit=0.5, patterns=("a",), threads=2)}),
        ("", ["rule.min_words=2", "rule.kind=short"], {"rule": Short(min_words=2)}),
        ("", ["rule.kind=tidy"], {"rule": Clean(kind="tidy")}),
        ("", ["rule={kind = 'clean'}"], {"rule": Clean()}),
        ("", ["inner.deep.cache=x"], {"inner": Inner(best=Clean(limit=0.75), deep=Deep(value=4, cache="x"))}),
        ("", ["inner.best.threads=2"], {"inner": Inner(best=Clean(limit=0.75, threads=2), deep=Deep(value=4))}),
        ("[rule]\nkind = 'short'", ["rule.note=x"], {"rule": Short(note="x")}),
        ("[rule]\nkind = 'clean'", ["rule.threads=2"], {"rule": Clean(threads=2)}),
        ("[inner]", ["inner.best.threads=2"], {"inner": Inner(best=Clean(limit=0.25, threads=2))}),
        ("[[listed]]", ["listed.0.deep.value=9"], {"listed": (Inner(deep=Deep(value=9, cache="there")),)}),
    ],
)
def test_an_override_changes_one_value_of_what_the_recipe_says_or_else_of_the_default(
    tmp_path: Path, text: str, overrides: list[str], changed: dict[str, Any]
) -> None:
    (tmp_path / "a.toml").write_text(text)
    assert load(Outer, tmp_path / "a.toml", overrides) == Outer(**changed)


def test_a_setting_of_another_kind_than_the_default_has_needs_its_kind(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("")
    with pytest.raises(ConfigError, match=r"rule\.min_words: unknown key\nKnown keys here: .*kind"):
        load(Outer, tmp_path / "a.toml", ["rule.min_words=2"])


def test_a_later_override_wins() -> None:
    tree: dict[str, Any] = {}
    for override in ("a.b=1", "a.b=2", "a.c=x"):
        apply_override(tree, override)
    assert tree == {"a": {"b": 2, "c": "x"}}


# --- as data and as TOML -------------------------------------------------------------------------------------------


TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ['"', "\\", '"""', "\r\n", "\x7f", "\\\x7f", "\x00\x1f", "\u2028\x85", "é😀", "# no comment", "'", " ", "\ufeff"]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
RULES = st.builds(Short, min_words=st.integers(1, 2**63 - 1), note=TEXT) | st.builds(
    Clean,
    kind=st.sampled_from(["clean", "tidy"]),
    patterns=st.lists(TEXT, max_size=3).map(tuple),
    limit=st.none() | FLOATS,
    threads=st.integers(1, 9),
)
DEEP = st.builds(Deep, value=st.integers(-(2**63), 2**63 - 1), cache=TEXT)
WORK = st.builds(
    Work,
    path=st.none() | TEXT.map(Path),
    rate=FLOATS,
    share=st.floats(0, 1),
    shuffle=st.booleans(),
    grid=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple), max_size=3).map(tuple),
    rules=st.lists(RULES, max_size=3).map(tuple),
    extra=st.none() | st.lists(DEEP, max_size=2).map(tuple),
    workers=st.integers(1, 9),
    place=DEEP,
)
RECIPES = st.builds(
    Recipe,
    name=TEXT,
    steps=st.integers(-(2**63), 2**63 - 1),
    first=RULES,
    maybe=st.none() | RULES,
    work=WORK,
    deep=st.lists(DEEP, max_size=3).map(tuple),
)


@given(RECIPES)
def test_a_recipe_written_as_toml_is_the_same_recipe_when_read_again(recipe: Recipe) -> None:
    text = to_toml(plain(recipe))
    again = build(Recipe, tomllib.loads(text))
    assert again == recipe
    assert to_toml(plain(again)) == text


@given(RECIPES)
def test_what_cannot_change_the_output_is_left_out_at_any_depth_and_nothing_else_is(recipe: Recipe) -> None:
    def without(value: object) -> object:
        if isinstance(value, dict):
            kept = {key: without(inner) for key, inner in value.items()}
            return {key: inner for key, inner in kept.items() if key not in ("threads", "cache", "workers", "place")}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    stable = plain(recipe, stable_only=True)
    assert stable == without(plain(recipe))
    assert json.loads(json.dumps(stable)) == stable


def test_a_key_of_an_earlier_recipe_is_told_its_new_name() -> None:
    class Section(Config):
        eval_every: int = 1
        steps: int = 1

    with pytest.raises(ConfigError, match="evaluate_every: this key is now 'eval_every'"):
        build(Section, {"evaluate_every": 3})
    with pytest.raises(ConfigError, match="questions: unknown key"):  # a name that is new only elsewhere
        build(Section, {"questions": 3})
