import re
import shutil
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bloomery.serve.server import serving

from .fakes import HOSTILE, FakeAnswerer, FakeModels

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


class Stage(NamedTuple):
    page: Page
    bloom: FakeAnswerer
    slag: FakeAnswerer
    gate: threading.Event

    def ask(self, question: str) -> None:
        self.page.get_by_label("Your message").fill(question)
        self.page.keyboard.press("Enter")

    def answered(self, text: str) -> None:
        """Wait until the last answer is whole, and is this."""
        expect(self.page.locator(".assistant .text").last).to_have_text(text)
        expect(self.page.locator(".assistant .facts").last).to_contain_text("token")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def stage(browser: Browser) -> Iterator[Stage]:
    """The page with two models. Bloom stops in the middle of an answer until the gate is open, as it is at first."""
    gate = threading.Event()
    gate.set()
    bloom, slag = FakeAnswerer("bloom", 0.01, gate), FakeAnswerer("slag", 0.01)
    with (
        serving(FakeModels(bloom, slag)) as url,
        browser.new_context(viewport={"width": 360, "height": 640}) as context,
    ):
        page = context.new_page()
        broken: list[str] = []
        page.on("pageerror", lambda error: broken.append(str(error)))
        page.goto(url)
        expect(page.locator("#model option")).to_have_count(2)
        yield Stage(page, bloom, slag, gate)
        assert broken == []
        gate.set()


def test_an_answer_is_read_while_it_arrives(stage: Stage) -> None:
    stage.gate.clear()
    stage.ask("hello")
    answer = stage.page.locator(".assistant")
    expect(answer.locator(".text")).to_have_text("bloom heard")
    expect(answer).to_have_class(re.compile("streaming"))
    expect(stage.page.get_by_role("button", name="Stop")).to_be_visible()
    stage.gate.set()
    stage.answered("bloom heard hello (1 messages)")
    expect(answer).not_to_have_class(re.compile("streaming"))
    expect(answer.locator(".facts")).to_have_text(re.compile(r"^5 tokens · [\d,.]+ tokens/s$"))
    expect(stage.page.get_by_role("button", name="Send")).to_be_visible()


def test_the_second_turn_sends_the_first(stage: Stage) -> None:
    stage.ask("hello")
    stage.answered("bloom heard hello (1 messages)")
    stage.ask("again")
    stage.answered("bloom heard again (3 messages)")
    assert stage.bloom.heard[-1] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "bloom heard hello (1 messages)"},
        {"role": "user", "content": "again"},
    ]


def test_switching_the_model_keeps_the_conversation_and_marks_the_switch(stage: Stage) -> None:
    stage.ask("hello")
    stage.answered("bloom heard hello (1 messages)")
    mark = stage.page.locator(".switch")
    stage.page.get_by_label("Model").select_option("slag")
    expect(mark).to_have_text("slag answers from here on")
    stage.page.get_by_label("Model").select_option("bloom")
    expect(mark).to_have_count(0)
    stage.page.get_by_label("Model").select_option("slag")
    stage.ask("and you")
    stage.answered("slag heard and you (3 messages)")
    expect(mark).to_have_count(1)
    assert stage.slag.heard[-1][0]["content"] == "hello"


def test_html_in_an_answer_is_shown_as_text(stage: Stage) -> None:
    stage.ask("hostile")
    stage.answered(HOSTILE)
    assert stage.page.locator("#conversation :is(script, .text img)").count() == 0
    assert stage.page.title() == "Bloomery"


def test_an_error_is_shown_and_the_question_can_be_asked_again(stage: Stage) -> None:
    stage.ask("refuse")
    trouble = stage.page.get_by_role("alert")
    expect(trouble).to_contain_text("the weights are torn\nThe log of the server says where", use_inner_text=True)
    expect(stage.page.locator(".assistant")).to_have_count(0)
    stage.page.get_by_label("Model").select_option("slag")
    stage.page.get_by_role("button", name="Try again").click()
    expect(trouble).to_contain_text("the weights are torn")
    assert [len(model.heard) for model in (stage.bloom, stage.slag)] == [1, 1]
    stage.ask("hello")
    stage.answered("slag heard hello (1 messages)")
    expect(stage.page.get_by_role("button", name="Try again")).to_have_count(0)


def test_an_error_in_the_middle_keeps_what_had_arrived_until_it_is_asked_again(stage: Stage) -> None:
    stage.ask("break")
    expect(stage.page.get_by_role("alert")).to_contain_text("a bug in the engine")
    expect(stage.page.locator(".assistant .text")).to_have_text("bloom heard")
    stage.page.get_by_role("button", name="Try again").click()
    expect(stage.page.get_by_role("alert")).to_contain_text("a bug in the engine")
    expect(stage.page.locator(".assistant")).to_have_count(1)
    assert len(stage.bloom.heard[-1]) == 1


def test_a_server_that_is_gone_is_an_error_too(stage: Stage) -> None:
    stage.page.route("**/v1/chat/completions", lambda route: route.abort())
    stage.ask("hello")
    expect(stage.page.get_by_role("alert")).to_be_visible()
    stage.page.unroute("**/v1/chat/completions")
    stage.page.get_by_role("button", name="Try again").click()
    stage.answered("bloom heard hello (1 messages)")


def test_the_stop_button_ends_the_answer_and_keeps_it(stage: Stage) -> None:
    stage.page.get_by_text("Settings").click()
    stage.page.get_by_label("Maximum answer length").fill("100000")
    stage.ask("long")
    expect(stage.page.locator(".assistant .text")).to_contain_text("on on on")
    stage.page.get_by_role("button", name="Stop").click()
    expect(stage.page.locator(".facts").last).to_have_text(re.compile(r"about \d+ tokens .* stopped"))
    assert stage.bloom.closed.wait(60)
    stage.ask("hello")
    stage.answered("bloom heard hello (3 messages)")


def test_a_new_conversation_begins_with_nothing(stage: Stage) -> None:
    stage.gate.clear()
    stage.ask("hello")
    expect(stage.page.locator(".assistant .text")).to_have_text("bloom heard")
    stage.page.get_by_role("button", name="New").click()
    expect(stage.page.get_by_text("Ask the model a question")).to_be_visible()
    expect(stage.page.locator(".message")).to_have_count(0)
    stage.gate.set()
    stage.ask("hello")
    stage.answered("bloom heard hello (1 messages)")


def test_shift_enter_makes_a_line_and_the_settings_are_sent(stage: Stage) -> None:
    stage.page.get_by_text("Settings").click()
    stage.page.get_by_label("Temperature").fill("0.3")
    stage.page.get_by_label("Maximum answer length").fill("3")
    question = stage.page.get_by_label("Your message")
    question.fill("one")
    question.press("Shift+Enter")
    question.press_sequentially("two")
    question.press("Enter")
    stage.answered("bloom heard one\ntwo")
    expect(stage.page.locator(".facts").last).to_contain_text("truncated at the maximum length")
    assert stage.bloom.heard[-1][0]["content"] == "one\ntwo"
    assert (stage.bloom.samplings[-1].temperature, stage.bloom.samplings[-1].max_tokens) == (0.3, 3)


def test_without_a_model_the_page_says_how_to_make_one(browser: Browser) -> None:
    with serving(FakeModels()) as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        expect(page.get_by_text("No run folder holds a model yet")).to_be_visible()
        page.get_by_label("Your message").fill("hello")
        expect(page.get_by_role("button", name="Send")).to_be_disabled()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_window(browser: Browser, width: int) -> None:
    bloom = FakeAnswerer("runs/a-run-with-a-very-long-name/07-finetune-c0ffee12")
    with (
        serving(FakeModels(bloom)) as url,
        browser.new_context(viewport={"width": width, "height": 640}) as context,
    ):
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#model option")).to_have_text(bloom.name)
        page.get_by_label("Your message").fill("x" * 500)
        page.keyboard.press("Enter")
        expect(page.locator(".facts").last).to_contain_text("token")
        page.get_by_text("Settings").click()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for box in page.locator("header *, .message, form *").all():
            bounds = box.bounding_box()
            assert bounds is None or bounds["x"] + bounds["width"] <= width


@pytest.mark.slow
def test_the_page_asks_for_the_token_once(browser: Browser) -> None:
    token = "0123456789abcdef"
    with serving(FakeModels(FakeAnswerer("bloom")), token=token) as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.get_by_label("Token of this server").fill("wrong")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("alert")).to_have_text("That is not the token.")
        page.get_by_label("Token of this server").fill(token)
        page.keyboard.press("Enter")
        expect(page.locator("#model option")).to_have_text("bloom")
        page.get_by_label("Your message").fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .text")).to_have_text("bloom heard hello (1 messages)")
        assert page.evaluate("document.cookie") == ""
        again = context.new_page()
        again.goto(url)
        expect(again.locator("#model option")).to_have_text("bloom")
