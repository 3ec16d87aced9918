"""What must not be found in text that is trained on: settings of decontamination, for documents and conversations."""

from pathlib import Path
from typing import Annotated

from pydantic import field_validator, model_validator

from bloomery.core.bounds import Between, DiskPath, PositiveLength
from bloomery.core.config import Config


class Sought(Config):
    files: tuple[DiskPath, ...] = ()
    """Of tasks, or folders of them: jsonl (.zst and .gz too) and parquet. A task is called as its file."""
    tasks: tuple[str, ...] = ()
    """Tasks that [evaluate] knows, by their names, as it asks them."""
    data: tuple[DiskPath, ...] = ()
    """The files of those tasks, or folders of them. None: from the hub."""
    fields: tuple[str, ...] = ()
    """Fields of a row that hold what must not be found. None named: those that evaluation sets use (query, …)."""
    ngram_words: Annotated[int, Between(5, 1000, "fewer words are in every text, and more in none")] = 13
    """A text of so many words and more is found by any so many words of it in a row, a shorter one only whole."""
    min_question_words: PositiveLength = 4
    """
    Texts of fewer words are not looked for alone, only together with their choices. Of what is written without spaces,
    two characters count as a word here.
    """

    @field_validator("files", "data")
    @classmethod
    def _may_lie_at_home(cls, places: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(place.expanduser() for place in places)

    @model_validator(mode="after")
    def _something_is_looked_for(self) -> "Sought":
        if not self.files and not self.tasks:
            raise ValueError("neither files nor tasks are named, so nothing could be looked for")
        return self

    @model_validator(mode="after")
    def _questions_are_shorter(self) -> "Sought":
        if self.min_question_words >= self.ngram_words:
            raise ValueError(f"min_question_words={self.min_question_words} is no less than {self.ngram_words=}")
        return self
