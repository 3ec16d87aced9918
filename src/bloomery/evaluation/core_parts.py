"""The table of CORE's 22 tasks: examples, chance, and how rows become prompts, as in DCLM's evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from bloomery.evaluation import shapes
from bloomery.evaluation.shapes import Shape

ANSWER = "\nAnswer:"


@dataclass(frozen=True)
class Part:
    """One of the 22."""

    shots: int = 10
    chance: float = 0.0
    ending: str = ""
    """What stands between a question and its choice, beside the space."""
    aliases: tuple[str, ...] = ()

    def shape(self, name: str) -> Shape:
        if name.startswith("hellaswag"):
            return shapes.hellaswag
        return partial(shapes.ready, ending=self.ending)


PARTS: Mapping[str, Part] = {
    "hellaswag_zeroshot": Part(0, 0.25, aliases=("hellaswag",)),
    "jeopardy": Part(ending=ANSWER, aliases=("jeopardy_all",)),
    "bigbench_qa_wikidata": Part(),
    "arc_easy": Part(10, 0.25, ANSWER),
    "arc_challenge": Part(10, 0.25, ANSWER),
    "copa": Part(0, 0.5),
    "commonsense_qa": Part(10, 0.2),
    "piqa": Part(10, 0.5, ANSWER),
    "openbook_qa": Part(0, 0.25),
    "lambada_openai": Part(0, aliases=("lambada",)),
    "hellaswag": Part(10, 0.25),
    "winograd": Part(0, 0.5, aliases=("winograd_wsc",)),
    "winogrande": Part(0, 0.5),
    "bigbench_dyck_languages": Part(),
    "agi_eval_lsat_ar": Part(3, 0.2),
    "bigbench_cs_algorithms": Part(),
    "bigbench_operators": Part(),
    "bigbench_repeat_copy_logic": Part(),
    "squad": Part(),
    "coqa": Part(0),
    "boolq": Part(10, 0.62, ANSWER),
    "bigbench_language_identification": Part(10, 0.091),
}
