"""The browser of this machine, and what a page of it does."""

from __future__ import annotations

import contextlib
import os
import shutil
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge"]
"""What `make browser` looks for too."""


def find_browser() -> str:
    """Path of a browser; the variable CHROMIUM names another one than those in PATH."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise RuntimeError("no Chromium or Chrome in PATH: install one (`make browser` says how)")
    return path


@contextlib.contextmanager
def chromium(*flags):
    """A headless browser, with further flags. Its sandbox needs a user other than root."""
    flags = [*flags, "--no-sandbox"] if os.geteuid() == 0 else list(flags)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=flags)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page with all that it asks for and complains of."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def _note(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def hosts(self):
        """Hosts that something was asked of."""
        return {urlsplit(url).netloc for url in self.requests if not url.startswith("data:")}

    def text(self, selector):
        return self.page.inner_text(selector)

    def wait_for_text(self, selector, text):
        """Waits until the element has this text in it."""
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector).innerText.includes(text)", arg=[selector, text]
        )
