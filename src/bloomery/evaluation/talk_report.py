"""Of the page: how held-out conversations go, before and after finetuning."""

from collections.abc import Mapping
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import Html, count, decimal, number, percent
from bloomery.evaluation.pieces import Report, at, named, note, scored, text, tile

MODELS = {"pretrain": "before finetuning", "finetune": "after finetuning", "prefer": "after preference tuning"}


def talk_tiles(report: Report) -> list[Html]:
    """Of the last model that was asked."""
    told = named(report, "conversations")
    last = next((model for model in reversed(MODELS) if model in told), None)
    if last is None:
        return []
    ended, bits = at(told, last, "ended", "value"), at(told, last, "bits_per_byte")
    low, high = (percent(at(told, last, "ended", key)) for key in ("low", "high"))
    asked = f"by themselves, of {count(told.get('n'))} in held-out conversations; 95% interval {low} to {high}"
    given = "a byte of what the assistant says there, as this model expects it"
    return [tile("Answers that ended", percent(ended), asked), tile("Given answers", f"{decimal(bits)} bits", given)]


def held_out_talks(report: Report) -> list[object]:
    told = named(report, "conversations")
    rows = [_row(name, named(told, model)) for model, name in MODELS.items() if model in told]
    heads = ["Model", "Answers that end (95% interval)", "Bits per byte", "Perplexity", "Tokens said", "Tokens given"]
    warmth = number(told.get("temperature"))
    drawn = "greedily" if warmth == 0 else f"at temperature {text(told.get('temperature'))}"
    asked = f"One answer in each of {count(told.get('n'))} held-out conversations, at most "
    how = f"{count(told.get('max_tokens'))} tokens, {drawn}."
    measured = " Bits per byte and perplexity are of the given answers. Every answer is in conversations.jsonl."
    return [charts.table(heads, rows), note(asked, how, measured)] if rows else []


def _row(name: str, one: Mapping[str, Any]) -> list[object]:
    ended = scored("ended", one.get("ended"))
    sizes = [decimal(at(one, "length", key), 1) for key in ("said", "given")]
    return [name, ended, decimal(one.get("bits_per_byte")), decimal(one.get("perplexity")), *sizes]
