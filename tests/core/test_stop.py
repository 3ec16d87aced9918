import os
import signal
import subprocess
import sys
import threading

import pytest

from bloomery import cli
from bloomery.core.stop import Stop, Terminated, on_sigterm


def test_sigterm_takes_note_and_what_was_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with on_sigterm() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        with pytest.raises(Terminated):
            stop.check()
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_second_sigterm_ends_a_process_at_once() -> None:
    code = (
        "import os, signal\nfrom bloomery.core.stop import on_sigterm\n"
        "with on_sigterm():\n os.kill(os.getpid(), signal.SIGTERM)\n print('noted', flush=True)\n"
        " os.kill(os.getpid(), signal.SIGTERM)\n print('never', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "noted\n")


def test_another_thread_changes_no_signal() -> None:
    found: list[Stop] = []

    def work() -> None:
        with on_sigterm() as stop:
            found.append(stop)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not found[0].asked
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_verb_that_was_asked_to_end_exits_with_143(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(options: object) -> int:
        raise Terminated

    monkeypatch.setitem(cli.VERBS, "doctor", ended)
    assert cli.main(["doctor"]) == 143
    assert capsys.readouterr().err == "ended as asked; the same command goes on from here\n"
