"""A real browser: Playwright for Python with the Chromium of the system. Nothing is downloaded."""

import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium():
    """The browser; without one, or without Playwright, the tests are skipped with the reason."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium on the PATH ({', '.join(NAMES)})")
    with playwright.sync_playwright() as play:
        # Without a sandbox, since continuous integration often runs as root; the pages are our own.
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Seen:
    """A page in the browser, with what it complained about and what it asked for."""

    def __init__(self, browser, path, *, width=1280, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.complaints, self.requests = [], []
        self.page = self.context.new_page()
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

        def only_itself(route):
            self.requests.append(route.request.url)
            if len(self.requests) == 1:
                route.continue_()
            else:
                route.abort()

        self.page.route("**/*", only_itself)
        self.page.goto(path.resolve().as_uri())

    def column(self, table, index):
        """The texts of a column of a table, from top to bottom; `table` is a locator."""
        return [text.strip() for text in table.locator(f"tbody tr > *:nth-child({index + 1})").all_text_contents()]

    def colours(self, selector):
        """Text and background of an element."""
        style = "element => { const s = getComputedStyle(element); return [s.color, s.backgroundColor]; }"
        return self.page.locator(selector).first.evaluate(style)

    def overflow(self):
        """By how many pixels the page is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")


@pytest.fixture
def look(chromium):
    """`look(path, width=360, scheme="dark")` opens a page."""
    opened = []

    def open_page(path, **options):
        opened.append(Seen(chromium, path, **options))
        return opened[-1]

    yield open_page
    for seen in opened:
        seen.context.close()
