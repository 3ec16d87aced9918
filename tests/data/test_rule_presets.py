from typing import get_args

from bloomery.core.config import build, plain
from bloomery.data.filters.apply import PRESETS, DocumentColumns, judge
from bloomery.data.filters.features import RulePreset
from bloomery.data.filters.heuristics import Length
from bloomery.data.filters.published import C4, Gopher, Repetition
from bloomery.stages.config import Filter


def test_every_name_has_its_rules() -> None:
    assert set(get_args(RulePreset.model_fields["name"].annotation)) == set(PRESETS)


def test_a_preset_is_spelled_out_for_its_domains_and_in_its_place() -> None:
    rules = [{"kind": "length"}, {"kind": "preset", "name": "gopher", "domains": ["web"]}, {"kind": "c4"}]
    config = build(Filter, {"rules": rules})
    assert config.rules == (Length(), Gopher(domains=("web",)), Repetition(domains=("web",)), C4())
    saved = plain(config)
    assert saved["rules"][1]["min_words"] == 50
    assert build(Filter, saved) == config


def test_the_hard_filter_of_the_seed_keeps_other_scripts_unless_asked_not_to() -> None:
    text = "文字 と 言葉 " * 40
    documents = DocumentColumns([text, "x"], ["web"] * 2, [None] * 2, ["a", "b"])
    assert judge(PRESETS["seed-1386"], documents).reasons == [None, "length.too_short"]
    assert judge(PRESETS["seed-1386-ascii"], documents).reasons == ["characters.ascii", "length.too_short"]
