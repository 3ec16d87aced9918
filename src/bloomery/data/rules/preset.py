"""Rule `preset`: the rules of a known corpus under its name. A recipe that is saved spells them out."""

from typing import Literal

from bloomery.data.facts.verdict import Common


class Preset(Common):
    """
    The rules of a known corpus, which `bloomery.data.rule_presets` lists.

    A recipe that is loaded holds those rules in the place of this one, for the same domains.
    """

    kind: Literal["preset"] = "preset"
    name: Literal["gopher", "c4", "fineweb", "fineweb-edu-like", "starcoder", "seed-1386", "seed-1386-ascii"]
