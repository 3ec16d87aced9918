"""Rules that drop documents for how they look, or mask what is private in them: tagged by `kind`, one file a family."""

from bloomery.data.rules.c4 import C4
from bloomery.data.rules.code import Code
from bloomery.data.rules.fineweb import FineWeb
from bloomery.data.rules.gopher import Gopher
from bloomery.data.rules.length import Length
from bloomery.data.rules.repetition import Repetition

Rule = Length | Gopher | Repetition | C4 | FineWeb | Code

__all__ = ["C4", "Code", "FineWeb", "Gopher", "Length", "Repetition", "Rule"]
