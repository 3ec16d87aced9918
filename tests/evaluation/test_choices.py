from pathlib import Path

import numpy as np
import pytest

from bloomery.core.errors import DataError
from bloomery.core.signals import StopRequest, Terminated
from bloomery.evaluation.llmc_choices import ChoiceExample, MultipleChoiceEval, log_likelihoods
from tests.model.made import SHAPES, VOCAB_SIZE, lively
from tests.shards.test_choices import by_hand
from tests.tokenizer.made import small
from tests.train.made import on_cpu

import torch


def ids(*numbers: int) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
    return np.array(numbers, dtype=np.uint16)


def one_by_one(model: torch.nn.Module, question: list[int], answer: list[int]) -> float:
    """Σ log p, with a forward pass for every token."""
    total, seen = 0.0, list(question)
    for token in answer:
        scores = model.logits(model(torch.tensor([seen])))[0, -1]  # type: ignore[operator]
        total += float(torch.log_softmax(scores, -1)[token])
        seen.append(token)
    return total


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_the_likelihood_of_an_answer_is_that_of_its_tokens_one_by_one(shape: object) -> None:
    model = lively(shape).eval()  # type: ignore[arg-type]
    rows = [([3, 1, 4], [1, 5, 9]), ([2], [6]), ([5, 3, 5, 8], [9, 7])]
    with torch.no_grad():
        expected = [one_by_one(model, *row) for row in rows]
    found = log_likelihoods(model, on_cpu(), [(ids(*question), ids(*answer)) for question, answer in rows])
    assert found.tolist() == pytest.approx(expected, abs=1e-4)


def test_of_a_question_that_is_too_long_the_end_is_read() -> None:
    model = lively(SHAPES[0]).eval()
    context = model.config.context_length
    question = np.random.default_rng(0).integers(0, VOCAB_SIZE, 2 * context).astype(np.uint16)
    whole, cut = log_likelihoods(model, on_cpu(), [(question, ids(1, 2)), (question[-context + 1 :], ids(1, 2))])
    assert float(whole) == pytest.approx(float(cut), abs=1e-5)


def test_an_answer_that_is_longer_than_the_context_is_scored_by_its_end() -> None:
    model = lively(SHAPES[0]).eval()
    (found,) = log_likelihoods(model, on_cpu(), [(ids(1), ids(*[2] * (model.config.context_length + 5)))])
    assert torch.isfinite(found)


def test_the_likeliest_answer_by_bytes_and_by_tokens_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of −6 and −8: by tokens (2 and 4) the second wins, by bytes (6 and 4) the first."""
    known = iter([-6.0, -8.0] * 2)
    monkeypatch.setattr(
        "bloomery.evaluation.llmc_choices.log_likelihoods",
        lambda model, precision, rows: torch.tensor([next(known) for _ in rows]),
    )
    answers = (ids(1, 1), ids(2, 2, 2, 2))
    examples = [ChoiceExample(question=ids(0), answers=answers, right=right) for right in (0, 1)]
    examples[1] = ChoiceExample(question=ids(0), answers=answers, right=0)
    asked = MultipleChoiceEval(examples, [0, 3, 1], rows_at_once=3)
    stop = StopRequest()
    found = asked.accuracy("questions", lively(SHAPES[0]), on_cpu(), stop)
    assert found == {"questions": 1.0, "questions_per_token": 0.0}
    stop.asked = True
    with pytest.raises(Terminated):
        asked.accuracy("questions", lively(SHAPES[0]), on_cpu(), stop)


def test_of_a_file_as_many_examples_are_asked_as_wanted(tmp_path: Path) -> None:
    file = tmp_path / "eval.bin"
    file.write_bytes(by_hand())
    assert len(MultipleChoiceEval.read(file, small()).examples) == 2
    assert [one.right for one in MultipleChoiceEval.read(file, small(), limit=1).examples] == [2]
    file.write_bytes(by_hand(count=0)[:1024])
    with pytest.raises(DataError, match="holds no example"):
        MultipleChoiceEval.read(file, small())
