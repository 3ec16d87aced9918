"""Rules that drop documents for how they look, or mask what is private in them: tagged by `kind`, one file a family."""

from bloomery.data.rules.boilerplate import Boilerplate
from bloomery.data.rules.c4 import C4
from bloomery.data.rules.characters import Characters
from bloomery.data.rules.code import Code
from bloomery.data.rules.fineweb import FineWeb
from bloomery.data.rules.gopher import Gopher
from bloomery.data.rules.language import Language
from bloomery.data.rules.length import Length
from bloomery.data.rules.lines import Lines
from bloomery.data.rules.pii import Pii
from bloomery.data.rules.preset import Preset
from bloomery.data.rules.repetition import Repetition
from bloomery.data.rules.urls import Urls

Rule = (
    Length
    | Characters
    | Gopher
    | Repetition
    | C4
    | FineWeb
    | Code
    | Boilerplate
    | Lines
    | Language
    | Pii
    | Urls
    | Preset
)

__all__ = [
    "C4",
    "Boilerplate",
    "Characters",
    "Code",
    "FineWeb",
    "Gopher",
    "Language",
    "Length",
    "Lines",
    "Pii",
    "Preset",
    "Repetition",
    "Rule",
    "Urls",
]
