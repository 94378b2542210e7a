"""The window, in a real browser on a real server: what it shows is what is there, and what is clicked is done.

With TEST_SCREENSHOTS set to a directory, the pictures of the README are written there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rewake.api.window import policy
from rewake.client import Client
from rewake.models import DEFAULT_MODEL
from tests.server import ServerProcess

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAGE = (Path(__file__).parents[2] / "rewake" / "api" / "ui" / "index.html").read_text(encoding="utf-8")
STRANGE = "<img src=x onerror=alert(1)>"
MARKUP = "<script>document.title = 'broken'</script><b>bold</b> & more"
STAGED = ("coder", "reviewer", "writer")
SECONDS = 60_000  # milliseconds that anything may take


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("ui") / "data", "--memory", "100MiB", "--disk", "1GiB") as running:
        story = "The lamp stood near the river, and the engine was quiet. " * 30
        for agent in STAGED:
            talk: list[Any] = []
            for words in (f"You are the {agent}. {story}What is quiet?", "Say it again.", "Once more, please."):
                talk.append({"role": "user", "content": words})
                text, _ = running.chat(agent, talk, max_tokens=16)
                talk.append({"role": "assistant", "content": text})
        running.chat(STRANGE, [{"role": "user", "content": MARKUP}], max_tokens=8)
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the window is not tested")
    path = os.environ.get("TEST_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium here (apt install chromium, or name one in TEST_BROWSER): the window is not tested")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        yield launched
        launched.close()


class Opened:
    """The page, and everything that went wrong in it."""

    def __init__(self, browser: Any, server: ServerProcess, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1180, "height": 820}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(SECONDS)
        self.wrong: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.wrong.append(request.url) if str(server.port) not in request.url else None)
        self.page.goto(f"http://127.0.0.1:{server.port}/ui")
        self.page.locator("#state", has_text="live").wait_for()

    def row(self, agent: str) -> Any:
        return self.page.locator("#agents button").filter(has=self.page.locator(".name", has_text=re.compile(rf"^\W*{re.escape(agent)}$")))

    def answer(self, text: str) -> None:
        """To the question that is asked."""
        self.page.locator("#answer").fill(text)
        self.page.locator("#answer").press("Enter")

    def close(self) -> None:
        self.context.close()
        assert not [w for w in self.wrong if "data:," not in w]


def test_the_window_shows_agents_and_talks_with_one(browser: Any, server: ServerProcess) -> None:
    window = Opened(browser, server)
    page, row = window.page, window.row("coder")
    assert row.count() == 1
    with Client(f"http://127.0.0.1:{server.port}") as client:
        known = client.show("coder")
        assert f"{known['pages_in_memory']} in memory" in row.inner_text() and f"{known['tokens']} tokens, 3 turns" in row.inner_text()
        assert "extend" in row.inner_text() and "ms" in row.inner_text()
        row.click()
        page.locator(".said.assistant").nth(2).wait_for()
        assert page.locator(".said").count() == 6
        assert page.locator(".said.user span").nth(1).inner_text() == "Say it again."
        page.locator("#text").fill("And now in other words.")
        page.locator("#text").press("Enter")
        cost = page.locator(".said .cost")
        cost.wait_for()
        assert cost.inner_text().startswith("extend: ")
        row.filter(has_text="4 turns").wait_for()
        assert len(client.show("coder")["turns"]) == 4
    window.close()


def test_fork_rewind_pin_and_forget(browser: Any, server: ServerProcess) -> None:
    window = Opened(browser, server)
    page = window.page
    with Client(f"http://127.0.0.1:{server.port}") as client:
        window.row("writer").click()
        page.locator("#fork").click()
        window.answer("writer/copy")
        window.row("writer/copy").wait_for()
        page.locator("#who", has_text="writer/copy").wait_for()
        assert client.show("writer/copy")["turns"] == client.show("writer")["turns"]
        page.locator(".said.assistant").nth(2).wait_for()
        page.locator("#rewind").click()
        window.answer("1")
        window.row("writer/copy").filter(has_text="1 turns").wait_for()
        page.locator("#pin").click()
        page.locator("#pin", has_text="Unpin").wait_for()
        assert client.show("writer/copy")["pinned"]
        page.locator("#fork").click()
        window.answer("writer")
        page.locator("#note", has_text="already").wait_for()  # what is refused is said
        page.locator("#forget").click()
        page.locator("#question button", has_text="OK").click()
        window.row("writer/copy").wait_for(state="detached")
        assert "writer/copy" not in [a["agent"] for a in client.list()]
    assert "409" in "".join(window.wrong)  # as browsers log it
    window.wrong.clear()
    window.close()


def test_the_batch_and_new_agents_are_live(browser: Any, server: ServerProcess) -> None:
    window = Opened(browser, server)
    page = window.page
    stream = server.stream("runner", [{"role": "user", "content": "Tell me a long story about a lamp."}], max_tokens=2000)
    next(stream)
    page.locator("#batch li").filter(has_text="runner").wait_for()
    stream.close()
    page.locator("#idle").wait_for()
    window.row("runner").wait_for()
    page.locator("#new").click()
    window.answer("newcomer")
    page.locator("#who", has_text="newcomer").wait_for()
    page.locator("#text").fill("Say hello.")
    page.locator("#send").click()
    page.locator(".said .cost").wait_for()
    window.row("newcomer").filter(has_text="1 turns").wait_for()
    window.close()


def test_agents_of_the_model_that_is_chosen_are_shown(browser: Any, tmp_path: Path, tiny: Path) -> None:
    flags = ("--model", DEFAULT_MODEL, "--model", str(tiny), "--memory", "400MiB", "--max-loaded", "1")
    with ServerProcess(tmp_path / "data", *flags) as two:
        for agent, model in (("bob", tiny.name), ("ann", DEFAULT_MODEL)):
            two.chat(agent, [{"role": "user", "content": f"I am {agent}."}], model=model, max_tokens=4)
        window = Opened(browser, two)
        page = window.page
        window.row("ann").click()
        page.locator("#model").select_option(tiny.name)
        page.locator("#state", has_text="is not loaded now").wait_for()
        page.locator("#who", has_text="Nobody").wait_for()
        assert window.row("ann").count() == 0
        page.locator("#load").click()
        window.row("bob").click()
        page.locator(".said.user", has_text="I am bob.").wait_for()
        assert not page.locator("#load").is_visible()
        page.locator("#fork").click()
        window.answer("bob's twin")
        window.row("bob's twin").wait_for()
        page.locator("#text").fill("And who are you?")
        page.locator("#send").click()
        page.locator(".said .cost").wait_for()
        page.reload()  # the address says which one
        window.row("bob's twin").filter(has_text="2 turns").wait_for()
        with Client(f"http://127.0.0.1:{two.port}", DEFAULT_MODEL) as client:
            assert [agent["agent"] for agent in client.list()] == ["ann"]
        page.locator("#state", has_text="is not loaded now").wait_for()  # the listing has put the other one in its place
        window.close()


def test_what_models_and_names_say_is_never_markup(browser: Any, server: ServerProcess) -> None:
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval", PAGE)
    window = Opened(browser, server)
    window.row(STRANGE).click()
    window.page.locator(".said.user", has_text="bold").wait_for()
    assert window.page.locator(".said.user span").inner_text() == MARKUP
    assert window.page.title() == "Rewake" and window.page.locator("#agents img, #talk b >> text=bold").count() == 0
    window.close()


def test_by_keyboard_on_a_phone_and_in_the_dark(browser: Any, server: ServerProcess, tmp_path: Path) -> None:
    folder = Path(os.environ.get("TEST_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    with Client(f"http://127.0.0.1:{server.port}") as client:
        forgotten = [agent["agent"] for agent in client.list() if agent["agent"] not in STAGED]
        for agent in forgotten:
            client.forget(agent)
    stream = server.stream("planner", [{"role": "user", "content": "Tell me a long story about a lamp."}], max_tokens=4000)
    next(stream)
    for name, options in (
        ("window", {}),
        ("window-dark", {"color_scheme": "dark"}),
        ("window-phone", {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}),
    ):
        window = Opened(browser, server, **options)
        page = window.page
        window.row("coder").wait_for()
        for agent in forgotten:  # what is shown may be half a second old
            window.row(agent).wait_for(state="detached")
        chosen = page.locator("#agents button[aria-pressed=true]")
        for _ in range(9):
            page.keyboard.press("j")
            if "reviewer" in chosen.inner_text():
                break
        page.locator(".said.assistant").nth(2).wait_for()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "text"
        page.keyboard.press("Escape")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#batch li").filter(has_text="planner").wait_for()
        page.screenshot(path=folder / f"{name}.png")
        page.keyboard.press("f")
        assert page.locator("#question").is_visible()
        page.keyboard.press("Escape")
        window.close()
    stream.close()
    light, dark = (folder / "window.png").read_bytes(), (folder / "window-dark.png").read_bytes()
    assert light != dark


def test_the_page_runs_nothing_but_its_own_script(server: ServerProcess) -> None:
    answer = httpx.get(f"http://127.0.0.1:{server.port}/ui")
    rules = answer.headers["content-security-policy"]
    assert rules == policy(answer.text) and "unsafe" not in rules and "default-src 'none'" in rules
    assert not re.search(r"""\s(on\w+|style)=["']""", answer.text)


def test_events_are_snapshots_and_messages_are_read_back(server: ServerProcess) -> None:
    with server.http.stream("GET", "/v1/rewake/events") as events:
        lines = events.iter_lines()
        assert next(lines) == "event: snapshot" and next(lines).startswith('data: {"agents":[{')
    messages = server.http.get("/v1/rewake/messages/coder").json()["messages"]
    assert messages[0]["role"] == "user" and messages[0]["content"].startswith("You are the coder.")
    assert server.http.get("/v1/rewake/messages/nobody").status_code == 404
