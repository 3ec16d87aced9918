"""Rule `language`: documents in a language that the recipe does not name."""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from bloomery.core.bounds import PositiveLength, Share
from bloomery.data import extras
from bloomery.data.facts.batch import Facts, Flags
from bloomery.data.facts.verdict import Common, Finding, below

Code = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]


class Language(Common):
    """
    Documents in a language that the recipe does not name, or in none that can be told.

    The language is that which py3langid finds (Lui and Baldwin 2012, langid.py, ACL demo; an extra: `bloomery[web]`).
    Penedo et al. 2024, 3.3 (arXiv 2406.17557) keep documents from a confidence of 0.65 on, with another classifier.
    """

    kind: Literal["language"] = "language"
    keep: Annotated[tuple[Code, ...], Field(min_length=1)] = ("en",)
    """Languages that stay, as ISO 639-1 names them."""
    min_confidence: Share = 0.65
    characters: PositiveLength = 1000
    """How much of a document is looked at, from its start."""

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        identifier, names = _identifier(), np.full(len(facts), "", object)
        sure = np.ones(len(facts))
        for place in np.flatnonzero(live).tolist():
            name, confidence = identifier.classify(facts.texts[place][: self.characters])
            names[place], sure[place] = name, float(confidence)
        yield below("language.unsure", sure, self.min_confidence)
        for name in sorted(set(names[live]) - set(self.keep)):
            yield Finding(f"language.{name}", np.asarray(live & (names == name)), sure)


@cache
def _identifier() -> Any:
    langid = extras.load("py3langid.langid", extra="web")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
