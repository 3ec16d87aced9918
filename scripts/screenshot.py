"""
A picture of the page in a conversation with a real model, for the README.

    python scripts/screenshot.py --runs runs --question "What is iron?" --question "And steel?"

Serves the runs on a free port of loopback, asks the questions in Chromium, waits for each answer, takes the picture.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from bloomery.core.errors import RunError
from bloomery.core.log import info
from bloomery.serve.models import ModelRegistry
from bloomery.serve.server import serving

QUESTIONS = ("What is iron used for?", "And what is steel?")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
SECONDS_TO_ANSWER = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of run folders")
    parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
    parser.add_argument("--question", action="append", help="may be given several times")
    parser.add_argument("--model", help="its name in the picker; otherwise the first one")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--longest", type=int, default=256, help="tokens of an answer at most")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=760)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with serving(ModelRegistry(options.runs)) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme="dark" if options.dark else "light",
            device_scale_factor=2,
        )
        page.goto(url)
        converse(page, options.question or QUESTIONS, options.model, options.temperature, options.longest)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=options.out)
        browser.close()
    info(f"wrote {options.out}")


def chromium() -> str:
    """Where a Chromium is. Raises RunError."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise RunError("there is no Chromium", hint="Install it: apt install chromium")
    return found


def converse(page: Page, questions: Sequence[str], model: str | None, temperature: float, longest: int) -> None:
    """Ask one question after the other, as a person would."""
    expect(page.locator("#model")).to_be_enabled()
    if model is not None:
        page.get_by_label("Model").select_option(model)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill(str(temperature))
    page.get_by_label("Maximum answer length").fill(str(longest))
    page.get_by_text("Settings").click()
    for number, question in enumerate(questions, 1):
        page.get_by_label("Your message").fill(question)
        page.keyboard.press("Enter")
        ended = page.locator(".message.assistant .facts:not(:empty)")
        trouble = page.get_by_role("alert")
        expect(ended.nth(number - 1).or_(trouble).first).to_be_visible(timeout=SECONDS_TO_ANSWER * 1000)
        if trouble.count():
            raise RunError(f"{question!r} was not answered: {trouble.inner_text()}")


if __name__ == "__main__":
    main()
