import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from bloomery import cli
from bloomery.core.signals import StopRequest, Terminated, ending_on_sigterm, interruption, on_signals


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_takes_note_and_is_raised_at_the_end_if_nobody_has_looked() -> None:
    seen = []

    def work() -> None:
        with on_signals() as stop:
            stop.check()
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Terminated):
                stop.check()
            with pytest.raises(Terminated), on_signals() as inner:
                seen.append(inner is stop)
            seen.append(stop.asked)

    with pytest.raises(Terminated) as caught:
        work()
    assert (caught.value.code, seen) == (143, [True, True])


def test_what_was_before_comes_back_where_nobody_asked() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with on_signals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_first_sigterm_ends_a_block_and_those_that_follow_do_not_disturb_its_end() -> None:
    before, left = signal.getsignal(signal.SIGTERM), list[str]()

    def work() -> None:
        with ending_on_sigterm():
            try:
                assert isinstance(interruption(), KeyboardInterrupt)
                os.kill(os.getpid(), signal.SIGTERM)
                left.append("never")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                left.append(f"{interruption()}")

    with pytest.raises(Terminated) as caught:
        work()
    assert (caught.value.code, left) == (143, ["143"])
    signal.signal(signal.SIGTERM, before)
    with ending_on_sigterm():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_sigterm_that_a_callback_has_lost_is_raised_again_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.core.signals.SECONDS_OF_CLEANUP", -1.0)

    def work() -> None:
        with ending_on_sigterm():
            with pytest.raises(Terminated):
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        work()


def test_training_within_takes_note_and_a_sigterm_after_it_does_not_disturb_the_way_out() -> None:
    seen = list[object]()

    def work() -> None:
        with ending_on_sigterm():
            try:
                with on_signals() as stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                    seen.append(stop.asked)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                seen.append("saved")

    with pytest.raises(Terminated):
        work()
    assert seen == [True, "saved"]


def test_a_query_that_sigterm_cuts_short_is_no_interrupt_by_hand() -> None:
    from bloomery.data.dedup.candidates import interruptible

    def query() -> None:
        with ending_on_sigterm(), interruptible():
            with pytest.raises(Terminated):
                os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("Query interrupted")  # as DuckDB has it, whatever the signal raised

    with pytest.raises(Terminated):
        query()


SIGNALS = """
import os, signal, sys, time
from bloomery.core import signals
signal.signal(signal.SIGINT, signal.default_int_handler)
with signals.on_signals() as asked:
    asked.saves = sys.argv[1] == "saves"
    for number in sys.argv[2:]:
        if number == "wait":
            time.sleep(signals.SECONDS_BETWEEN_WISHES + 0.1)
        else:
            os.kill(os.getpid(), int(number))
    print("saved", flush=True)
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("saves 15 15 wait 15 15", 143, "saved\n"),
        ("saves 2 2 15", 130, "saved\n"),  # a launcher hands on what a terminal has sent to all
        ("saves 15 2 2", 143, "saved\n"),
        ("saves 2 wait 2", -signal.SIGINT, ""),
        ("nothing 15", 143, "saved\n"),
        ("nothing 2", -signal.SIGINT, ""),
    ],
)
def test_any_number_of_sigterms_is_one_wish_and_the_second_interrupt_by_hand_ends_at_once(
    words: str, code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, *words.split()], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, said)


def test_another_thread_changes_no_signal() -> None:
    found: list[StopRequest] = []

    def work() -> None:
        with on_signals() as stop:
            found.append(stop)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not found[0].asked
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("code", "how"), [(143, "ended as asked"), (130, "interrupted")])
def test_a_verb_that_was_asked_to_end_exits_with_the_number_of_the_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, how: str
) -> None:
    def ended(options: object) -> int:
        raise Terminated(code)

    monkeypatch.setitem(cli.VERBS, "doctor", ended)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == f"{how}; run the same command again to resume\n"


def test_sigterm_ends_a_verb_in_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def work(options: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setitem(cli.VERBS, "data", work)
    assert cli.main(["data", "dedup", "in", "--out", "out"]) == 143
    assert capsys.readouterr().err == "ended as asked; run the same command again to resume\n"
