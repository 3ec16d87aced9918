"""
The stage `synthesize`: conversations written by another model, through an endpoint that speaks OpenAI's protocol.

Off unless a recipe says `enabled = true` and names the endpoint: a key in the environment alone never spends money.
Each answer is one line of conversations.jsonl, written as it comes, so that a run that dies pays for nothing twice.
"""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.core.files import disk_errors, whole_file
from bloomery.core.log import progress
from bloomery.data import rows
from bloomery.stages.config import Synthesize

FILE = "conversations.jsonl"
SECONDS_TO_ANSWER = 120.0


def run(config: Synthesize, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    path = out / FILE
    if not config.enabled:
        with whole_file(path):
            pass
        return {"enabled": False, "conversations": 0}
    key = os.environ.get(config.key_variable, "") if config.key_variable else ""
    done = _written(path)
    tokens = sum(int(row["tokens"]) for row in done)
    with (
        disk_errors(path),
        path.open("a", encoding="utf-8") as file,
        progress("synthesize", "conversations", config.count) as meter,
    ):
        meter.start_at(float(len(done)))
        for number in range(len(done), config.count):
            if tokens >= config.max_tokens:
                break
            topic = config.topics[number % len(config.topics)]
            room = min(config.max_answer_tokens, config.max_tokens - tokens)
            messages, spent = _ask(config, topic, room, key)
            tokens += spent
            line = {"messages": messages, "topic": topic, "model": config.model, "tokens": spent}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            meter.at(float(number + 1), tokens=float(tokens))
    return {"enabled": True, "conversations": len(_written(path)), "tokens": tokens, "model": config.model}


def _written(path: Path) -> list[dict[str, Any]]:
    """What earlier attempts brought home; a line that a dying process left torn is cut off."""
    if not path.exists():
        return []
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return [found for _, found in rows.jsonl(path) if isinstance(found, dict)]


def _ask(config: Synthesize, topic: str, max_tokens: int, key: str) -> tuple[list[dict[str, str]], int]:
    """One question and its answer, and the tokens that they cost. Raises DataError for what is no answer."""
    question = [{"role": "user", "content": topic}]
    body = json.dumps({"model": config.model, "messages": question, "max_tokens": max_tokens}).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    url = config.endpoint.rstrip("/") + "/chat/completions"
    request = urllib.request.Request(url, data=body, headers=headers)
    cure = "What came so far is kept. Run the recipe again when the endpoint answers."
    try:
        with urllib.request.urlopen(request, timeout=SECONDS_TO_ANSWER) as reply:
            answer = json.loads(reply.read())
        content, spent = answer["choices"][0]["message"]["content"], int(answer["usage"]["total_tokens"])
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"refused: {error}", where=url, cure=cure) from None
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"did not answer: {str(error) or type(error).__name__}", where=url, cure=cure) from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"gave no chat completion: {error!r}", where=url, cure=cure) from None
    if not isinstance(content, str):
        raise DataError("gave an answer without text", where=url, cure=cure)
    return [*question, {"role": "assistant", "content": content}], spent
