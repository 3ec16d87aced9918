"""A report as the stage `evaluate` leaves it, of a small run that never was."""

import math
from typing import Any

DOMAINS = ("code", "documentation", "worlds")
KINDS = ("library", "library, later turn", "moved, later turn", "sum", "sum, later turn", "where", "who")


def full() -> dict[str, Any]:
    """A report as the stage `evaluate` leaves it, of a small run."""
    return {
        "recipe": "demo",
        "made": "2025-03-04T15:16:17Z",
        "versions": {"python": "3.11.9", "bloomery": "0.1.0", "torch": "2.9.1", "numpy": "2.3.1"},
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 2, "device": "cpu"},
        "model": {
            **{
                "parameters": 2_412_800,
                "context_length": 256,
                "vocab_size": 4096,
                "folder": "09-finetune-5ab3c1d2/model",
            },
            **{"tokenizer": "4f1c" * 16, "template": "a07e" * 16},
        },
        "answers": {
            **{"n": 200, "exact": 0.635, "ended": 0.985, "interval": [0.5664, 0.6987]},
            "by_kind": {
                kind: {"n": 28, "exact": round(0.97 - 0.11 * place, 4), "ended": round(1 - 0.01 * place, 4)}
                for place, kind in enumerate(KINDS)
            },
        },
        "bits_per_byte": {
            **{"model": 1.3127, "xz": 2.0461, "zstd": 2.1189, "bytes": 812_345, "documents": 311},
            "by_domain": {
                domain: {"model": 1.1 + 0.2 * n, "xz": 1.9, "zstd": 2.0 + 0.1 * n, "bytes": 270_000, "documents": 104}
                for n, domain in enumerate(DOMAINS)
            },
        },
        "leaks": {"checked": 200, "found": 0},
        "curves": {"pretrain": curve(3000, 8.3, 2.31, 0.02), "finetune": curve(420, 1.14, 0.21, 0.01)},
        "written": {"pretrain": [{"step": 100 * n, "prompt": "The ", "text": f"lamp {n} is in"} for n in range(1, 9)]},
        "corpus": corpus(),
        "dropped_samples": [
            {
                "reason": reason,
                "value": 0.1234567 * (n + 1),
                "domain": "code",
                "text": f"def f{n}():\n    return {{}}\n" * 6,
            }
            for n, reason in enumerate(list(corpus()["filter"]["reasons"])[:8])
        ],
        "samples": {
            "answers": [talk(kind, right) for right in (True, False) for kind in KINDS],
            "continuations": [
                {"prompt": "def main():\n", "text": "    parser = argparse.ArgumentParser()\n    return parser\n"},
                {"prompt": "The module ", "text": "textwrap has fill and wrap. Which module has fill?"},
            ],
        },
        "stages": [
            {
                "stage": stage,
                "folder": f"{n:02d}-{stage}-9f31c2aa",
                "seconds": 3.7 * n**2 + 0.4,
                "resumed": stage == "pretrain",
            }
            for n, stage in enumerate([*corpus(), "pretrain", "finetune"], 1)
        ],
    }


def curve(steps: int, first: float, last: float, peak: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        fallen = last + (first - last) * math.exp(-7 * step / steps)
        rows.append(
            {
                **{"step": step, "loss": fallen + 0.12 * math.sin(step * 12.9898), "tokens_per_second": 8700.0},
                **{"learning_rate": peak * (1 - step / steps), "gradient_norm": 0.4 + 0.2 * math.sin(step * 7.31)},
                **{"mfu": 0.4123, "memory_bytes": 812_345_678},
                "seconds": {"data": 0.02, "forward_backward": 4.1, "optimizer": 0.6, "hooks": 0.1},
            }
        )
        if step % 100 == 0:
            rows.append({"step": step, "validation_loss": fallen + 0.05, "validation_bits_per_byte": fallen / 2.5})
        if step % 20 == 0:
            rows.append(
                {"step": step, "weight_norm": 90.0 + step / 100, "update_norm": 0.4, "gradient_flow": flow(step)}
            )
        if step == 210:
            rows.append({"step": step, "skipped": "the loss is inf", "skipped_loss": "inf", "samples": [31, 8, 4]})
            rows.append({"step": step, "failed": "wandb", "error": "ConnectionError: nobody answers"})
            rows.append({"step": step, "rolled_back_to": 180})
    return rows


def flow(step: int) -> dict[str, float]:
    layers = ["embed", *(f"blocks.{n}" for n in range(6)), "norm"]
    return {name: (0.3 + 0.05 * n) * math.exp(-step / 900) + 0.02 for n, name in enumerate(layers)}


def corpus() -> dict[str, Any]:
    sizes = {"code": 5210, "documentation": 2144, "worlds": 6000}
    reasons = {"gopher.too_few_words": 812, "classifier": 377, "repetition.duplicate_line_characters": 154}
    reasons |= {"code.long_line": 61, "fineweb.short_lines": 44, "code.generated": 23, "code.xml": 1}
    return {
        "fetch": {
            **{"documents": 13_354, "bytes": 61_204_112, "rejected": 12, "reasons": {"not_utf8": 8, "binary": 4}},
            "by_domain": {domain: {"documents": n, "bytes": n * 4583} for domain, n in sizes.items()},
            "by_source": {
                f"{domain} files": {
                    **{"documents": n, "bytes": n * 4583, "rejected": 4, "reasons": {"not_utf8": 3, "binary": 1}},
                    "licenses": {"MIT": n - 9, "unknown": 9},
                }
                for domain, n in sizes.items()
            },
        },
        "classify": {"classifiers": [judged("quality", "high"), judged("toxicity", "low")]},
        "filter": {
            **{"documents": 13_354, "kept": 11_873, "dropped": 1481, "reasons": reasons},
            "by_domain": {domain: {"documents": n, "kept": n - 400, "dropped": 400} for domain, n in sizes.items()},
            "reasons_by_domain": {domain: {"gopher.too_few_words": 271, "classifier": 126} for domain in sizes},
            "masked": {"documents": 93, "mail": 120},
            "scores": {name: cut(sizes) for name in ("quality", "toxicity")},
        },
        "dedup": {
            **{"documents": 11_873, "kept": 11_214, "removed": 659, "exact": 403, "near": 256, "compared": 1877},
            **{"reasons": {"exact": 403, "near": 256, "overlap.ngram": 12}, "hits": 12},
            **{"clusters": 512, "largest_cluster": 37, "dropped": 12, "hits_by_task": {"arc_easy": 9, "boolq": 3}},
            "by_domain": {d: {"documents": n - 400, "kept": n - 620, "removed": 220} for d, n in sizes.items()},
        },
        "tokenizer": {
            **{"kind": "byte_bpe", "vocab_size": 4096, "unused_tokens": 193, "encoder": "tiktoken"},
            "bytes_per_token": {"code": 2.913, "documentation": 3.402, "worlds": 4.118},
            "bytes_per_token_unseen": {"code": 2.811, "documentation": 3.297},
            "gpt2": {"compared": True, "bytes_per_token": {"code": 2.234, "documentation": 4.456}},
            "sample": {"code": {"bytes": 2_053_585, "documents": 94, "of_documents": 343, "share": 0.2721}},
            "fertility": {"latin": {"documents": 694, "tokens_per_word": 2.168, "tokens_per_character": 0.274}},
        },
        "shard": sharded(),
        "instruct": {
            **{"conversations": 20_000, "rejected": 3, "cut_at_a_turn": 17, "rejected_by_reason": {"too_long": 3}},
            "train": {
                "conversations": 19_600,
                "rows": 3466,
                "tokens": 880_112,
                "supervised": 171_002,
                "packing": 0.9879,
            },
        },
    }


def sharded() -> dict[str, Any]:
    """The statistics of the shards."""
    return {
        **{"tokens": 12_288_004, "documents": 14_020, "held_out_tokens": 250_112, "held_out_documents": 224},
        "mix": {
            "code": {"asked": 0.45, "tokens": 5_529_601, "epochs": 1.213, "share": 0.45},
            "documentation": {"asked": 0.3, "tokens": 3_072_001, "epochs": 4.0, "share": 0.25},
            "worlds": {"asked": 0.25, "tokens": 3_686_402, "epochs": 0.87, "share": 0.3},
        },
        "anneal": {
            "worlds": {
                **{"asked": 1.0, "tokens": 400_111, "asked_tokens": 512_345, "epochs": 0.1, "share": 1.0},
                "limited_by": "epochs",
            }
        },
        **{"anneal_tokens": 400_111, "anneal_documents": 1203},
    }


def judged(name: str, keep: str) -> dict[str, Any]:
    """The statistics of one classifier."""
    return {
        **{"name": name, "kind": "contrast", "keep": keep, "examples": 4000, "positives": 2000, "held_out": 402},
        **{"auc": 0.98712, "precision": 0.9512, "recall": 0.9421, "brier": 0.0413, "threshold": 0.5},
        **{"calibration_error": 0.0213, "strength": 10.0},
        "bins": [
            {"low": n / 10, "high": (n + 1) / 10, "texts": 40, "score": n / 10 + 0.05, "positive": n / 10 + 0.03}
            for n in range(10)
        ],
        "cuts": [
            {"threshold": n / 20, "precision": 0.5 + n / 50, "recall": 1 - n / 40, "reached": 0.5} for n in range(1, 20)
        ],
        "caught": {"broken": 1.0, "cut": 0.7234, "repeated": 0.9787, "shuffled": 0.9355, "spam": 1.0},
        "telling_positive": ["return", "self .", "the", ") :", "\n \n", "in the", "import"],
        "telling_negative": ["click", "buy", "Ã ©", "online ,", "deals", "! !", "best"],
    }


def talk(kind: str, right: bool) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "Mia put the lamp in the kitchen. Tom hid the coin in the shed. Who had the coin?"}
    ]
    if "later" in kind:
        messages += [
            {"role": "assistant", "content": "Tom had the coin."},
            {"role": "user", "content": "Where is the lamp?"},
        ]
    answer = "The lamp is in the kitchen."
    said = answer if right else "The lamp is in the shed."
    return {"kind": kind, "messages": messages, "expected": answer, "said": said, "exact": right, "ended": True}


def cut(sizes: dict[str, int]) -> dict[str, Any]:
    """What limits of one classifier did."""
    near = {"id": "a", "domain": "code", "cut": 0.5, "text": "def f():\n    pass\n" * 5}
    return {
        "by_domain": {
            domain: {"documents": n - 300, "passed": n - 400, "bins": [n // 20] * 20} for domain, n in sizes.items()
        },
        "samples": {
            "kept": [near | {"value": 0.5 + n / 1000, "id": f"k{n}"} for n in range(20)],
            "dropped": [near | {"value": 0.49 - n / 1000, "id": f"d{n}"} for n in range(20)],
        },
    }
