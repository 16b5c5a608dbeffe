"""The page in a real browser, with a real server and a model that says "hop hop hop …" for as long as it may."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.chat import conversation
from rabbitllm.chat.conversation import Conversation, Exchange, SavedChat
from rabbitllm.errors import BusyError
from rabbitllm.generation.request import Limits, Request, Sampling
from tests.chat.talkers import parrot_folder
from tests.server.serving import NAME, Running, running
from tests.server.test_models import serving
from tests.server.test_page import ATTRIBUTES, MATHML, hostile_texts
from tests.support.browser import SECONDS, Browser, Tab, chromium
from tests.support.picture_models import build, encoded, picture
from tests.support.thinking_models import ANSWER, QUESTION, REASONING_TOKENS, THOUGHT, thinker
from tests.support.tiny_models import split

pytestmark = pytest.mark.skipif(chromium() is None, reason="Chromium is not installed")

SAYS = {" ": "h", "h": "o", "o": "p", "p": " "}
HOPS = "hop " * 300
SHIFT = 8
KEY = "sesame"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(parrot_folder(tmp_path_factory.mktemp("page") / "model", SAYS))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, limits=Limits(running=2, waiting=1)) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, server: Running) -> Iterator[Tab]:
    """The page, in a browser that has never seen it, asking for the likeliest tokens."""
    tab = browser.tab(f"{server.address}/")
    tab.wait(f"document.querySelector('#model').textContent === '{NAME}'")
    assert tab.run("document.querySelector('#attach').hidden")
    settings(tab, temperature=0)
    yield tab
    assert all(address.startswith((server.address, "blob:")) for address in tab.asked_for())
    tab.close()


def settings(tab: Tab, **values: Any) -> None:
    tab.click("#open")
    for name, value in values.items():
        tab.run(f"document.querySelector('#{name}').focus(); document.querySelector('#{name}').select()")
        tab.write(str(value))
    tab.click("#close")
    tab.run("new Promise((settled) => setTimeout(settled))")  # what closing it does comes as an event


def ask(tab: Tab, question: str) -> None:
    tab.click("#question")
    tab.write(question)
    tab.press("Enter")


def idle(tab: Tab) -> None:
    tab.wait("document.querySelector('#log').ariaBusy === 'false' && !document.querySelector('#send').hidden")


def texts(tab: Tab, selector: str = "article") -> list[str]:
    texts: list[str] = tab.run(f"[...document.querySelectorAll('{selector} .text')].map((one) => one.textContent)")
    return texts


def under(tab: Tab) -> str:
    """What stands below the last answer."""
    words: str = tab.run("[...document.querySelectorAll('.assistant .under > :first-child')].at(-1).textContent")
    return words


VERSIONS = "[...document.querySelectorAll('.versions')].map((one) => one.textContent.slice(1, -1))"
CONTROL = 2


def answered(tab: Tab, *expected: str) -> None:
    """Wait until these are the messages."""
    shown = "JSON.stringify([...document.querySelectorAll('article .text')].map((one) => one.textContent))"
    tab.wait(f"{shown} === {json.dumps(json.dumps(expected, separators=(',', ':')))}")
    idle(tab)


def press_button(tab: Tab, within: str, name: str) -> None:
    tab.run(f"[...document.querySelectorAll('{within} button')].find((one) => one.textContent === '{name}').click()")


def trouble(tab: Tab) -> str:
    message: str = tab.wait("document.querySelector('[role=alert]')?.textContent")
    return message


def kept(tab: Tab) -> list[dict[str, Any]]:
    """The conversations in the browser's store."""
    chats: list[dict[str, Any]] = tab.run(
        "Object.keys(localStorage).filter((key) => key.startsWith('rabbitllm.chat.'))"
        ".map((key) => JSON.parse(localStorage[key]))"
    )
    return chats


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def another_request(server: Running, waits: Callable[[], object]) -> Iterator[None]:
    """Run another request, whose taker waits with every token and so holds up all passes: an answer then goes on for as
    long as a test needs, however slow the browser is."""
    begun = threading.Event()
    goes_on = True

    def notify(event: object) -> None:
        begun.set()
        if goes_on:
            waits()

    ids = tuple(server.model.tokenizer(" ")["input_ids"])
    handle = server.batch.submit(Request(ids, 1000), notify)
    try:
        assert begun.wait(SECONDS)
        yield
    finally:
        goes_on = False
        handle.cancel()
        eventually(lambda: server.batch.stats.running == 0)


@pytest.fixture
def slowly(server: Running) -> Iterator[None]:
    """Tokens so far apart that an answer takes most of a minute."""
    with another_request(server, lambda: time.sleep(0.05)):
        yield


class TcpProxy:
    """Passes bytes on to a server, until it is cut."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._open: list[socket.socket] = []
        self._begin()

    def _begin(self) -> None:
        threading.Thread(target=self._accept, args=(self._socket,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                upstream = socket.create_connection(self._to)
                self._open += [client, upstream]
                for source, sink in ((client, upstream), (upstream, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all connections, and take no more."""
        for connection in (self._socket, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()

    def mend(self) -> None:
        """Take connections again."""
        self._socket = socket.create_server(("127.0.0.1", self.port))
        self._begin()


def test_streamed_answer_survives_a_reload(tab: Tab) -> None:
    settings(tab, max_tokens=801)
    tab.run(
        "window.seen = new Set(); new MutationObserver(() => seen.add(document.querySelector('.assistant .text')?."
        "textContent.length)).observe(document.querySelector('#log'), {childList: true, subtree: true})"
    )
    ask(tab, "What do rabbits do?")
    idle(tab)
    assert texts(tab) == ["What do rabbits do?", HOPS[:801]]
    assert len(tab.run("[...seen].filter(Boolean)")) > 2
    below = tab.run("document.querySelector('.assistant .under span').textContent")
    assert below.startswith("801 tokens · ")
    assert "first after" in below
    assert below.endswith("reached the maximum tokens")
    tab.wait("/disk \\d+ % .*copies \\d+ % .*computing \\d+ %/.test(document.querySelector('#shares').textContent)")
    tab.wait("document.querySelector('#requests').textContent === 'requests: 0 running, 0 waiting'")
    tab.resize(360, 700)  # a phone: one line, under the bar
    assert tab.run("document.querySelector('#shares').getClientRects().length") == 1
    line = "(({height}) => height)(document.querySelector('summary').getBoundingClientRect())"
    assert tab.run(line) < 35
    assert tab.run("document.querySelector('#shares').scrollWidth <= document.querySelector('#shares').clientWidth")
    tab.resize(1000, 700)
    tab.click("#work > summary")
    tab.wait("document.querySelector('#facts').innerText.includes('KV cache')")
    assert "0 running, 0 waiting; at most" in tab.run("document.querySelector('#facts').innerText")

    tab.reload()
    tab.wait("document.querySelectorAll('article').length === 2")
    assert texts(tab) == ["What do rabbits do?", HOPS[:801]]
    assert tab.run("document.querySelector('.assistant .under span').textContent") == below
    tab.wait("document.querySelector('#title').value === 'What do rabbits do?'")
    assert tab.complaints() == []


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("how", ["key", "button"])
def test_stopped_answer_is_kept_and_its_request_cancelled(tab: Tab, server: Running, how: str) -> None:
    cancelled = server.batch.stats.ended.get("cancelled", 0)
    ask(tab, "Go on!")
    tab.wait("document.querySelector('.assistant .text')?.textContent.length > 3")
    assert server.batch.stats.running == 2
    if how == "key":
        tab.run("document.querySelector('#log').focus()")
        tab.press("Escape")
    else:
        tab.click("#stop")
    assert tab.run("document.activeElement.id") == "question"
    idle(tab)
    eventually(lambda: server.batch.stats.running == 1)
    assert server.batch.stats.ended["cancelled"] == cancelled + 1
    (answer,) = texts(tab, ".assistant")
    assert HOPS.startswith(answer)
    tab.wait("document.querySelector('.assistant .under').textContent.includes('stopped')")
    (chat,) = kept(tab)
    assert chat["messages"][1]["stopped"] is True
    assert chat["messages"][1]["content"] == answer


@pytest.mark.usefixtures("slowly")
def test_reload_keeps_the_partial_answer_and_cancels_its_request(tab: Tab, server: Running) -> None:
    ask(tab, "Go on!")
    tab.wait("document.querySelector('.assistant .text')?.textContent.length > 3")
    tab.reload()
    tab.wait("document.querySelectorAll('article').length === 2")
    assert HOPS.startswith(texts(tab)[1])
    assert len(texts(tab)[1]) > 3
    eventually(lambda: server.batch.stats.running == 1)


def test_full_server_shows_the_retry_time(tab: Tab, server: Running) -> None:
    settings(tab, max_tokens=3)
    released = threading.Event()
    with another_request(server, lambda: released.wait(SECONDS)):
        waiting = []
        with contextlib.suppress(BusyError):
            while True:
                waiting.append(server.batch.submit(Request((5,), 1), lambda event: None))
        ask(tab, "Anybody there?")
        assert "The server's request queue is full. Try" in trouble(tab)
        shown = f"requests: 1 running, {len(waiting)} waiting"
        tab.wait(f"document.querySelector('#requests').textContent === '{shown}'")
        for handle in waiting:
            handle.cancel()
        released.set()
    tab.click("[role=alert] button")
    tab.wait("!!document.querySelector('.assistant')")
    idle(tab)
    assert texts(tab) == ["Anybody there?", "hop"]
    tab.wait("!document.querySelector('[role=alert]')")


@pytest.mark.usefixtures("slowly")
def test_lost_connection_keeps_the_partial_answer(browser: Browser, server: Running) -> None:
    relay = TcpProxy(server.port)
    tab = browser.tab(f"http://127.0.0.1:{relay.port}/")
    tab.wait(f"document.querySelector('#model').textContent === '{NAME}'")
    settings(tab, temperature=0)
    ask(tab, "Go on!")
    tab.wait("document.querySelector('.assistant .text')?.textContent.length > 3")
    relay.cut()
    assert "The connection was lost. The partial answer is kept." in trouble(tab)
    came = texts(tab)
    assert HOPS.startswith(came[1])
    assert len(came[1]) > 3
    eventually(lambda: server.batch.stats.running == 1)
    tab.click("[role=alert] button")
    tab.wait("document.querySelector('[role=alert]')?.textContent.includes('cannot be reached')")
    assert texts(tab) == came
    relay.mend()
    settings(tab, max_tokens=3)
    tab.click("[role=alert] button")
    tab.wait("document.querySelector('.assistant .text')?.textContent === 'hop'")
    idle(tab)
    assert texts(tab) == ["Go on!", "hop"]
    tab.close()
    relay.cut()


def test_refusal_shows_its_message(tab: Tab) -> None:
    settings(tab, max_tokens=3)
    ask(tab, "long " * 1000)
    assert trouble(tab).startswith("The server refused the request. ")
    assert "1,024" in trouble(tab) or "1024" in trouble(tab)


def test_shutdown_is_shown(tab: Tab, server: Running) -> None:
    server.models.is_closing = True
    try:
        ask(tab, "Still there?")
        assert trouble(tab).startswith("The server is not available. The server is shutting down. Try again")
    finally:
        server.models.is_closing = False


def test_shown_elements_are_kept_while_an_answer_streams(tab: Tab) -> None:
    """Else screen readers would read all of it again, and a selection would be lost."""
    settings(tab, max_tokens=3)
    ask(tab, "First?")
    tab.wait("!!document.querySelector('.assistant')")
    idle(tab)
    tab.run("window.old = document.querySelector('.user'); window.removed = 0;")
    tab.run(
        "new MutationObserver((records) => records.forEach((one) => removed += [...one.removedNodes].includes(old)))"
        ".observe(document.querySelector('#log'), {childList: true})"
    )
    ask(tab, "Second?")
    tab.wait("document.querySelectorAll('.assistant').length === 2")
    idle(tab)
    assert texts(tab) == ["First?", "hop", "Second?", "hop"]
    assert tab.run("document.querySelector('.user') === old && removed === 0")
    buttons = "[...document.querySelectorAll('.assistant')].map((one) => one.textContent.includes('Ask again'))"
    assert tab.run(buttons) == [False, True]


def test_api_key_is_requested_and_kept_for_the_tab(browser: Browser, folder: Path) -> None:
    with running(folder, api_key=KEY) as server:
        tab = browser.tab(f"{server.address}/")
        tab.wait("document.querySelector('#notice').textContent.includes('API key')")
        settings(tab, temperature=0, max_tokens=3)
        ask(tab, "Please?")
        assert "This server requires an API key." in trouble(tab)
        tab.click("[role=alert] input")
        tab.write(KEY)
        tab.click("[role=alert] button")
        tab.wait("document.querySelector('.assistant .text')?.textContent === 'hop'")
        idle(tab)
        tab.wait(f"document.querySelector('#model').textContent === '{NAME}'")
        tab.reload()
        tab.wait(f"document.querySelector('#model').textContent === '{NAME}'")
        assert KEY not in tab.run("JSON.stringify(localStorage)")
        tab.close()


HOSTILE = (
    "<img src=x onerror=\"document.title='hostile'\"> <script>document.title='hostile'</script>\n\n"
    "**bold** and `<b>`\n\n- one\n- [x] two\n\n```html\n<b>code</b>\n```\n\n"
    + "x" * 500
    + "\n\n\u05e9\u05dc\u05d5\u05dd"
)
LINKS = (
    "[the <b>page</b>](https://x.invalid/a) [a](https://x.invalid/b\"onclick=1) ![dog](https://x.invalid/dog.png) http://y.invalid/'onclick='\n\n"
    "[a](javascript:document.title='hostile') [b](data:text/html,x) <javascript:1> [c](/v1/models)\n\n"
    "|~~<i>old~~|number|\n|:-|-:|\n|[x](https://x.invalid/'style='y)|12|\n\n```\n" + "long line " * 100 + "\n```"
)


def test_imported_and_exported_files_are_never_markup(tab: Tab, browser: Browser, tmp_path: Path) -> None:
    saved = SavedChat(
        NAME, Conversation("Be <i>brief</i>.", (Exchange("<b>Well?</b>", HOSTILE, True), Exchange("a", "b")))
    )
    conversation.write_chat(tmp_path / "talk.json", saved)
    choose_file(tab, tmp_path / "talk.json")
    tab.wait("document.querySelectorAll('article').length === 4")
    assert texts(tab, ".user") == ["<b>Well?</b>", "a"]
    assert tab.run("document.querySelectorAll('#log :is(img, script, b, i)').length") == 0
    shape = tab.run("[...document.querySelector('.assistant .text').children].map((one) => one.tagName).join(' ')")
    assert shape == "P P UL DIV P P"
    assert tab.run("document.querySelector('.assistant code').textContent") == "<b>"
    assert tab.run("document.querySelector('.assistant pre').textContent") == "<b>code</b>"
    assert tab.run("getComputedStyle(document.querySelector('.assistant .text').lastChild).direction") == "rtl"
    tab.resize(360, 640)
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.run("document.querySelector('#log').scrollWidth <= document.querySelector('#log').clientWidth")
    tab.resize(1000, 700)

    tab.click("#export")
    download = browser.downloads / "b-Well-b.json"
    eventually(download.exists)
    assert conversation.read_chat(download) == saved
    tab.wait(f"document.title === '{NAME} · RabbitLLM'")

    (tmp_path / "other.json").write_text('{"format": "other"}')
    choose_file(tab, tmp_path / "other.json")
    tab.wait("document.querySelector('#notice').textContent.includes('other.json was not imported')")


def choose_file(tab: Tab, path: Path, selector: str = "#file") -> None:
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    field = tab.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
    tab.call("DOM.setFileInputFiles", files=[str(path)], nodeId=field)


def imported(tab: Tab, folder: Path, *exchanges: Exchange) -> None:
    """Open a saved conversation."""
    conversation.write_chat(folder / "talk.json", SavedChat(NAME, Conversation(None, exchanges)))
    choose_file(tab, folder / "talk.json")
    tab.wait(f"document.querySelectorAll('article').length === {2 * len(exchanges)}")


def test_links_are_safe_and_load_nothing(tab: Tab, tmp_path: Path) -> None:
    """The fixture asserts that the page asks nobody but its server."""
    imported(tab, tmp_path, Exchange("Links?", LINKS))
    links = tab.run("[...document.querySelectorAll('#log a')].map((a) => [a.textContent, a.href, a.rel, a.target])")
    outside = ["noopener noreferrer", "_blank"]
    assert links == [
        ["the <b>page</b>", "https://x.invalid/a", *outside],
        ["https://x.invalid/b", "https://x.invalid/b", *outside],
        ["dog", "https://x.invalid/dog.png", *outside],
        ["http://y.invalid/'onclick=", "http://y.invalid/'onclick=", *outside],
        ["x", "https://x.invalid/'style='y", *outside],
    ]
    elements = "[...document.querySelectorAll('.assistant .text *')]"
    attributes = tab.run(f"[...new Set({elements}.flatMap((element) => element.getAttributeNames()))].sort()")
    assert attributes == ["class", "dir", "href", "rel", "style", "tabindex", "target", "title", "type"]
    assert tab.run("document.querySelectorAll('#log :is(img, script, b, i, iframe)').length") == 0
    assert tab.run("[...document.querySelectorAll('#log [style]')].map((e) => e.style.cssText)") == [
        "text-align: left;",
        "text-align: right;",
        "text-align: left;",
        "text-align: right;",
    ]
    assert tab.run("document.title") == f"{NAME} · RabbitLLM"
    for width in (1000, 360):
        tab.resize(width, 700)
        assert tab.run(
            "(({scrollWidth, clientWidth}) => scrollWidth > clientWidth)(document.querySelector('.code pre'))"
        )
        assert tab.run("document.querySelector('.code code').getClientRects().length") == 1
        assert tab.run("document.querySelector('#log').scrollWidth <= document.querySelector('#log').clientWidth")


def test_questions_are_copied(tab: Tab, browser: Browser, tmp_path: Path) -> None:
    imported(tab, tmp_path, Exchange("First\nline?", "*a*"))
    tab.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    for role, text in (("user", "First\nline?"), ("assistant", "*a*")):
        tab.click(f".{role} .under button")
        tab.wait("document.querySelector('#notice').textContent === 'Copied.'")
        assert tab.run("window.copied") == text
    assert tab.run("document.querySelector('#title').value") == "First line?"


def test_code_is_copied_without_its_colours(tab: Tab, tmp_path: Path) -> None:
    code = 'def hop():\n    return "<b>"'
    imported(tab, tmp_path, Exchange("Code?", f"So:\n```python\n{code}\n```\n"))
    tab.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    assert tab.run("document.querySelectorAll('.code code span').length") > 0
    tab.click(".code .copy")
    tab.wait("document.querySelector('#notice').textContent === 'Copied.'")
    assert tab.run("window.copied") == code


def test_the_model_is_picked(browser: Browser, tmp_path: Path) -> None:
    """Each answer is that of the model that is picked when it is asked for; the choice outlasts the page."""
    words = {"hopper": "hop ", "ticker": "tic "}
    for name, word in words.items():
        split(parrot_folder(tmp_path / name, dict(zip(word[-1] + word[:-1], word, strict=True))))
    with serving({name: tmp_path / name for name in words}) as served:
        tab = browser.tab(f"{served.address}/")
        tab.wait("document.querySelectorAll('#model option').length === 2")
        assert not tab.run("document.querySelector('#model').disabled")
        settings(tab, temperature=0, max_tokens=8)
        for count, name in enumerate(("hopper", "ticker"), 1):
            choose = f"picker.value = '{name}'; picker.dispatchEvent(new Event('change'))"
            tab.run(f"(() => {{ const picker = document.querySelector('#model'); {choose}; }})()")
            assert tab.run("document.title") == f"{name} · RabbitLLM"
            tab.wait("document.querySelector('#facts').textContent.includes('the first request loads them')")
            assert tab.run("[...document.querySelectorAll('.bar i')].every((part) => part.clientWidth === 0)")
            ask(tab, "Well?")
            tab.wait(f"document.querySelectorAll('.assistant').length === {count}")
            idle(tab)
            assert set(words[name].strip()) <= set(texts(tab, ".assistant")[-1]) <= set(words[name])
        assert served.loads == ["hopper", "ticker"]
        tab.reload()
        tab.wait("document.title === 'ticker · RabbitLLM'")
        tab.close()


def test_the_list_of_conversations_on_a_phone(tab: Tab) -> None:
    tab.resize(360, 640)
    shown = "getComputedStyle(document.querySelector('#side')).display !== 'none'"
    expanded = "document.querySelector('#menu').ariaExpanded"
    assert not tab.run(shown)
    closings: list[Callable[[], None]] = [
        lambda: tab.click("#shut"),
        lambda: tab.press("Escape"),
        lambda: tab.click("#new"),
        lambda: tab.run("document.querySelector('#log').click()"),
    ]
    for close in closings:
        tab.click("#menu")
        assert tab.run(shown)
        assert tab.run(expanded) == "true"
        assert tab.run("document.activeElement.id") == "shut"
        close()
        assert not tab.run(shown)
        assert tab.run(expanded) == "false"
    tab.resize(1000, 700)
    assert tab.run("getComputedStyle(document.querySelector('#shut')).display") == "none"


@pytest.mark.parametrize("width", [360, 1000])
def test_number_fields_of_a_row_are_level(tab: Tab, width: int) -> None:
    tab.resize(width, 700)
    tab.click("#open")
    boxes = tab.run(
        "[...document.querySelectorAll('.grid input')].map((field) => field.getBoundingClientRect().toJSON())"
    )
    assert len({round(box["left"]) for box in boxes}) > 1
    for box in boxes:
        in_row = [other for other in boxes if other["top"] < box["bottom"] and other["bottom"] > box["top"]]
        assert {round(other["top"]) for other in in_row} == {round(box["top"])}


def test_conversations_are_renamed_deleted_and_restored(tab: Tab) -> None:
    settings(tab, max_tokens=3)
    ask(tab, "First?")
    tab.wait("!!document.querySelector('.assistant')")
    idle(tab)
    tab.click("#title")
    tab.run("document.querySelector('#title').select()")
    tab.write("Of hopping")
    tab.press("Enter")
    tab.click("#new")
    assert texts(tab) == []
    ask(tab, "Second?")
    tab.wait("!!document.querySelector('.assistant')")
    idle(tab)
    names = "[...document.querySelectorAll('#chats button')].map((one) => one.textContent)"
    assert tab.run(names) == ["Second?", "Of hopping"]
    tab.click("#delete")
    assert tab.run(names) == ["Of hopping"]
    assert len(kept(tab)) == 1
    tab.click("#notice button")
    assert tab.run(names) == ["Second?", "Of hopping"]
    assert texts(tab) == ["Second?", "hop"]
    tab.click("#chats li:last-child button")
    assert texts(tab) == ["First?", "hop"]


def test_answer_continues_while_another_conversation_is_open(tab: Tab, server: Running) -> None:
    settings(tab, max_tokens=3)
    released = threading.Event()
    with another_request(server, lambda: released.wait(SECONDS)):
        ask(tab, "First?")
        tab.click("#new")
        assert texts(tab) == []
        tab.click("#question")
        tab.write("Second?")
        tab.press("Enter")  # one at a time
        assert tab.run("document.querySelector('#question').value") == "Second?"
        assert texts(tab) == []
        released.set()
    idle(tab)
    tab.press("Enter")
    tab.wait("document.querySelector('.assistant .text')?.textContent === 'hop'")
    idle(tab)
    tab.click("#chats li:last-child button")
    assert texts(tab) == ["First?", "hop"]


def test_conversations_stay_in_order_when_the_status_comes_late(tab: Tab) -> None:
    settings(tab, max_tokens=3)
    tab.run(
        "{const ask = fetch; window.held = []; window.fetch = (path, ...rest) => ("
        "window.held && path === 'status' ? new Promise((go) => held.push(go)).then(() => ask(path, ...rest))"
        " : ask(path, ...rest));}"
    )
    ask(tab, "First?")
    answered(tab, "First?", "hop")
    tab.run("window.late = held; window.held = null")
    tab.click("#new")
    ask(tab, "Second?")
    answered(tab, "Second?", "hop")
    eventually(lambda: [has_times(chat) for chat in kept(tab)].count(True) == 1)
    tab.run("late.forEach((go) => go())")
    eventually(lambda: all(map(has_times, kept(tab))))
    tab.click("#chats li:last-child button")
    assert texts(tab) == ["First?", "hop"]


def has_times(chat: dict[str, Any]) -> bool:
    """Whether an answer says where its time went."""
    return "work" in chat["messages"][-1].get("took", {})


def test_a_browser_that_blocks_storage(server: Running, tmp_path: Path) -> None:
    blocked = {"profile": {"default_content_setting_values": {"cookies": 2}}}
    with Browser(tmp_path, blocked) as browser:
        tab = browser.tab(f"{server.address}/")
        with pytest.raises(RuntimeError, match="Access is denied"):
            tab.run("localStorage")
        tab.wait(f"document.querySelector('#model').textContent === '{NAME}'")
        assert "go with this page" in tab.run("document.querySelector('.hello').textContent")
        settings(tab, temperature=0, max_tokens=3)
        for question in ("First?", "Second?"):
            ask(tab, question)
            answered(tab, question, "hop")
            tab.click("#new")
        tab.click("#chats li:last-child button")
        assert texts(tab) == ["First?", "hop"]
        assert "keeps nothing: export" in tab.run("document.querySelector('#notice').textContent")
        assert tab.complaints() == []


def test_requests_carry_the_settings(tab: Tab) -> None:
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 2, "seed": 7}
    numbers |= {"presence_penalty": -0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    settings(tab, system="Be brief.", **numbers)
    tab.click("#question")
    tab.write("one")
    tab.press("Enter", SHIFT)
    tab.write("two")
    tab.press("Enter")
    tab.wait("!!document.querySelector('.assistant')")
    idle(tab)
    (body,) = (json.loads(body) for body in tab.posted())
    assert body == {
        "model": NAME,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **numbers,
    }


def test_a_refused_question_is_edited(tab: Tab) -> None:
    settings(tab, max_tokens=3)
    ask(tab, "First?")
    answered(tab, "First?", "hop")
    ask(tab, "x" * 2000)
    assert "The server refused the request. The prompt has" in trouble(tab)
    tab.click("[role=alert] .row button:last-child")
    assert tab.run("document.activeElement.value") == "x" * 2000
    tab.press("Escape")
    assert tab.run("document.activeElement.textContent") == "Edit"
    assert texts(tab) == ["First?", "hop", "x" * 2000]
    press_button(tab, "[role=alert]", "Edit")
    tab.run("document.activeElement.select()")
    tab.write("Shorter?")
    tab.press("Enter")
    answered(tab, "First?", "hop", "Shorter?", "hop")
    assert not tab.run("document.querySelector('[role=alert], .versions')")
    assert [len(chat["messages"]) for chat in kept(tab)] == [4]


def test_messages_have_versions(tab: Tab) -> None:
    settings(tab, max_tokens=3)
    ask(tab, "First?")
    answered(tab, "First?", "hop")
    ask(tab, "Second?")
    answered(tab, "First?", "hop", "Second?", "hop")
    settings(tab, max_tokens=7)
    press_button(tab, ".assistant:last-child", "Ask again")
    answered(tab, "First?", "hop", "Second?", "hop hop")
    assert tab.run(VERSIONS) == ["2 / 2"]
    tab.click("#question")
    tab.press("ArrowUp")  # in the empty field
    assert tab.run("document.activeElement.value") == "Second?"
    tab.run("document.activeElement.select()")
    tab.write("Another?")
    tab.press("Enter")
    answered(tab, "First?", "hop", "Another?", "hop hop")
    assert tab.run(VERSIONS) == ["2 / 2"]
    assert tab.run("document.activeElement.id") == "question"
    tab.click("[aria-label='Earlier version']")
    assert texts(tab) == ["First?", "hop", "Second?", "hop hop"]
    assert tab.run(VERSIONS) == ["1 / 2", "2 / 2"]
    assert tab.run("document.activeElement.id") == "log"  # that button can do no more
    tab.click(".assistant [aria-label='Earlier version']")
    assert texts(tab) == ["First?", "hop", "Second?", "hop"]

    tab.reload()
    tab.wait("document.querySelectorAll('article').length === 4")
    assert texts(tab) == ["First?", "hop", "Second?", "hop"]
    assert tab.run(VERSIONS) == ["1 / 2", "1 / 2"]
    tab.click(".user [aria-label='Later version']")
    assert texts(tab) == ["First?", "hop", "Another?", "hop hop"]
    sent = [[message["content"] for message in json.loads(body)["messages"]] for body in tab.posted()]
    assert sent == [["First?"], *[["First?", "hop", "Second?"]] * 2, ["First?", "hop", "Another?"]]
    assert tab.complaints() == []


@pytest.mark.usefixtures("slowly")
def test_an_edited_question_waits_for_the_end_of_an_answer(tab: Tab, tmp_path: Path) -> None:
    imported(tab, tmp_path, Exchange("Well?", "Yes."))
    press_button(tab, ".user", "Edit")
    ask(tab, "Go on!")
    tab.wait("document.querySelectorAll('.assistant').length === 2")
    tab.run("document.querySelector('.edit textarea').focus()")
    tab.press("Enter")
    assert "Stop the answer first." in tab.run("document.querySelector('#notice').textContent")
    assert len(tab.posted()) == 1
    press_button(tab, "#notice", "Stop")
    idle(tab)
    tab.press("Enter")
    tab.wait(f"({VERSIONS})[0] === '2 / 2'")
    assert len(tab.posted()) == 2


@pytest.mark.usefixtures("slowly")
def test_an_answer_stays_where_no_other_comes(tab: Tab, tmp_path: Path) -> None:
    imported(tab, tmp_path, Exchange("Well?", "Yes."))
    tab.run("window.fetch = () => new Promise((_, reject) => { window.refuse = () => reject(new Error()); })")
    press_button(tab, ".assistant", "Ask again")
    assert [len(chat["messages"]) for chat in kept(tab)] == [2]
    tab.run("window.refuse()")
    assert "cannot be reached" in trouble(tab)
    assert texts(tab) == ["Well?", "Yes."]


def test_conversations_are_searched_exported_and_deleted(tab: Tab, browser: Browser, tmp_path: Path) -> None:
    for exchange in (Exchange("Of hares?", "Long EARS."), Exchange("Of mice?", "Short ears.")):
        imported(tab, tmp_path, exchange)
        tab.wait(f"document.querySelector('.user .text').textContent === '{exchange.question}'")
    # as the page kept them before it knew versions
    old = {"id": "old", "title": "", "changed": 1, "system": "", "messages": [{"role": "user", "content": "Of foxes?"}]}
    tab.run(f"localStorage.setItem('rabbitllm.chat.old', {json.dumps(json.dumps(old))})")
    tab.reload()
    names = "[...document.querySelectorAll('#chats button')].map((one) => one.textContent)"
    everything = ["Of mice?", "Of hares?", "Of foxes?"]
    tab.wait(f"({names}).length === 3")
    assert tab.run(names) == everything
    tab.press("k", CONTROL)
    assert tab.run("document.activeElement.id") == "find"
    for words, shown in {
        "ears": everything[:2],
        "ears long": everything[1:2],
        "FOX": everything[2:],
        "owl": [],
    }.items():
        tab.run("document.activeElement.select()")
        tab.write(words)
        assert tab.run(names) == shown
        assert tab.run("document.querySelector('#none').hidden") == bool(shown)
    tab.run("document.activeElement.select()")
    tab.press("Delete")
    tab.click("#open")
    tab.click("#export-all")
    eventually((browser.downloads / "conversations.json").exists)
    tab.click("#delete-all")
    assert tab.run(names) == []
    assert kept(tab) == []
    choose_file(tab, browser.downloads / "conversations.json")
    tab.wait(f"({names}).length === 3")
    assert tab.run(names) == everything
    (browser.downloads / "conversations.json").unlink()


def test_colors_follow_the_system_until_they_are_chosen(tab: Tab) -> None:
    def is_dark() -> bool:
        color: str = tab.run("getComputedStyle(document.body).backgroundColor")
        return int(color.removeprefix("rgb(").split(",")[0]) < 128

    for scheme in ("light", "dark"):
        tab.scheme(scheme)
        assert is_dark() == (scheme == "dark")
    for color in ("light", "dark", ""):
        tab.run(f"Object.assign(document.querySelector('#colors'), {{value: '{color}'}}).onchange()")
        tab.scheme("light" if color == "dark" else "dark")
        assert is_dark() == (color != "light")
        tab.reload()
        assert is_dark() == (color != "light")


def test_hostile_texts_are_inert(tab: Tab) -> None:
    """Elements and attributes are those that the page's own code names, whatever a model writes."""
    result = tab.run(
        f"""
        import("/static/markdown.js").then(({{ update }}) => {{
          const tags = new Set(), attributes = new Set(), addresses = new Set();
          const parent = document.createElement("div");
          document.body.append(parent);
          for (const text of {json.dumps(hostile_texts(600))}) {{
            update(parent, text);
            for (const element of parent.querySelectorAll("*")) {{
              tags.add(element.localName);
              for (const {{ name, value }} of element.attributes) {{
                attributes.add(name);
                if (name === "href") addresses.add(new URL(value, location.href).protocol);
              }}
            }}
          }}
          parent.remove();
          return [tags, attributes, addresses].map((all) => [...all].sort());
        }})
        """
    )
    tags = {"a", "blockquote", "button", "code", "del", "div", "em", "hr", "input", "li", "ol", "p", "pre", "span"}
    tags |= {"strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "math", *MATHML.split("|")}
    assert {tag for tag in result[0] if tag not in tags and not re.fullmatch("h[3-6]", tag)} == set()
    assert "math" in result[0]
    own = {"aria-label", "checked", "class", "dir", "disabled", "display", "href", "rel", "start", "style", "tabindex"}
    own |= {"target", "title", "type"}
    assert {name for name in result[1] if name not in own and not re.fullmatch(ATTRIBUTES, name)} == set()
    assert set(result[2]) <= {"http:", "https:"}
    assert tab.run("document.title") == f"{NAME} · RabbitLLM"
    assert tab.complaints() == []


def test_formulas_and_colours_are_seen(tab: Tab, tmp_path: Path) -> None:
    deep = "\\left(" * 25 + "x" + "\\right)" * 25
    imported(tab, tmp_path, Exchange("Maths?", f"$\\frac{{a}}{{b}}$\n\n$${deep}$$\n\n```py\ndef f(): # a\n```"))
    box = tab.run("document.querySelector('mfrac').getBoundingClientRect().toJSON()")
    assert box["height"] > 15
    assert tab.run("document.querySelectorAll('.formula mrow').length") > 25
    colours = tab.run(
        "[...document.querySelectorAll('.code code span')].map((e) => [e.className, getComputedStyle(e).color])"
    )
    assert [kind for kind, _ in colours] == ["word", "name", "comment"]
    assert len({colour for _, colour in colours}) == 3


def test_settings_show_what_the_server_uses(browser: Browser, folder: Path, tab: Tab) -> None:
    def shown(tab: Tab) -> tuple[str, dict[str, str]]:
        tab.wait("document.querySelector('#sampling').textContent !== ''")
        fields = "[...document.querySelectorAll('.grid input')].map((field) => [field.id, field.placeholder])"
        return tab.run("document.querySelector('#sampling').textContent"), dict(tab.run(fields))

    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    nothing = dict.fromkeys((*names, *penalties), "")
    assert shown(tab) == (" (greedy: the model recommends no sampling)", nothing)
    with running(folder, sampling=Sampling(0.6, 0.95)) as server:
        other = browser.tab(f"{server.address}/")
        words = " (temperature 0.6, top_p 0.95)"
        assert shown(other) == (words, nothing | {"temperature": "0.6", "top_p": "0.95"})
        other.close()


AUDIT = r"""
(() => {
  const channels = (color) => {
    const [r, g, b, alpha = 1] = color.match(/[\d.]+/g).map(Number);
    return { rgb: [r, g, b], alpha };
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const over = ({ rgb, alpha }, below) => rgb.map((c, at) => c * alpha + below[at] * (1 - alpha));
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const color = channels(getComputedStyle(element).backgroundColor);
    return color.alpha === 1 ? color.rgb : over(color, behind(element.parentElement));
  };
  const within = document.querySelector("dialog[open]") ?? document.body;
  const isSeen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true })
    && !element.closest("option, .unseen, [disabled]:not(select)") && within.contains(element);
  const problems = [];
  const name = (element) => `${element.localName}#${element.id}.${element.className}`;
  const check = (element, style, text) => {
    const below = behind(element);
    const ratio = contrast(over(channels(style.color), below), below);
    if (ratio < 4.5) problems.push(`contrast ${ratio.toFixed(2)} of "${text.slice(0, 30)}" in ${name(element)}`);
  };
  for (const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); walker.nextNode();) {
    const { parentElement: element, data } = walker.currentNode;
    if (data.trim() && isSeen(element)) check(element, getComputedStyle(element), data);
  }
  for (const field of document.querySelectorAll("input, textarea, select")) {
    if (!isSeen(field)) continue;
    check(field, getComputedStyle(field), field.value);
    if (field.placeholder) check(field, getComputedStyle(field, "::placeholder"), field.placeholder);
  }
  const page = document.scrollingElement;
  if (page.scrollWidth > innerWidth) problems.push(`the page is ${page.scrollWidth} wide`);
  const scrolls = (one) => one && (getComputedStyle(one).overflowX !== "visible" || scrolls(one.parentElement));
  for (const element of document.body.querySelectorAll("*")) {
    if (!isSeen(element)) continue;
    const { left, right } = element.getBoundingClientRect();
    const isBeyond = right > innerWidth + 1 || left < -1;
    if (isBeyond && !scrolls(element.parentElement)) problems.push(`beyond the edge: ${name(element)}`);
  }
  for (const element of document.querySelectorAll("#log, dialog"))
    if (element.scrollWidth > element.clientWidth) problems.push(`${name(element)} scrolls sideways`);
  return problems;
})()
"""
RICH = (
    "# Of hares\n\nThey *hop*, ~~fly~~ and `run` [far](https://x.invalid/a): " + "hop" * 200 + "\n\n> quoted\n\n"
    "- [x] done\n- [ ] to do\n\n```python\n@cached\ndef hop(far=1):  # a comment\n    return 'a string' * 3 + "
    + "far + " * 60
    + "0\n```\n\n```diff\n+added\n-removed\n```\n\n| a | b |\n| - | - |\n| "
    + "wide" * 60
    + "| 2 |\n\n"
    "Inline $e^{i\\pi} = -1$.\n\n$$" + "a + " * 90 + "\\frac{1}{2}$$"
)


@pytest.mark.usefixtures("slowly")
def test_every_state_fits_and_is_legible(tab: Tab, tmp_path: Path) -> None:
    """Nothing goes beyond the edge, and text has a contrast of 4.5 as WCAG defines it, on a phone and on a desk, light
    and dark; controls that are disabled are exempt."""

    def check(state: str) -> None:
        for width in (380, 820, 1400):
            tab.resize(width, 800)
            for scheme in ("light", "dark"):
                tab.scheme(scheme)
                problems = tab.run(AUDIT)
                assert problems == [], (state, width, scheme)

    check("empty")
    imported(tab, tmp_path, Exchange("Well?", "Yes."), Exchange("w" * 500, RICH))
    check("long code, formulas and tables")
    press_button(tab, ".user", "Edit")
    check("a question is edited")
    press_button(tab, ".user", "Cancel")
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    tab.click("#open")
    check("settings and all that is folded")
    tab.click("#close")
    tab.click("#new")  # there is no room left in that one
    ask(tab, "Go on!")
    tab.wait("document.querySelectorAll('.assistant').length === 1")
    check("an answer comes")
    tab.press("Escape")
    idle(tab)
    tab.run("window.fetch = () => Promise.reject(new Error())")
    ask(tab, "Anybody there?")
    trouble(tab)
    check("an error")
    tab.resize(380, 800)
    tab.click("#menu")
    check("the list of conversations")


def test_the_focus_is_seen(tab: Tab, tmp_path: Path) -> None:
    imported(tab, tmp_path, Exchange("Well?", RICH))
    tab.run("document.activeElement.blur()")
    reached = set()
    for _ in range(40):
        tab.press("Tab")
        name, outline = tab.run(
            "(({ activeElement: e, body }) => [e === body ? '' : e.id || e.textContent, getComputedStyle(e).outline])"
            "(document)"
        )
        reached.add(name)
        assert not name or outline == "rgb(163, 74, 23) solid 2px", name
    assert {"new", "find", "export", "title", "open", "log", "question", "Copy", "Edit", "Ask again"} <= reached


def test_full_storage_is_told_until_there_is_room(tab: Tab, tmp_path: Path) -> None:
    notice = "document.querySelector('#notice').textContent"
    settings(tab, max_tokens=3)
    tab.run(
        "(() => { for (let size = 2 ** 20; size; size >>= 1) { try { for (;;)"
        " localStorage.setItem('other' + localStorage.length, 'x'.repeat(size)); } catch {} } })()"
    )
    settings(tab, seed=1)
    tab.wait(notice + """.includes("The browser's storage is full. Export")""")
    ask(tab, "Well?")
    answered(tab, "Well?", "hop")
    assert "The browser's storage is full. Export" in tab.run(notice)
    assert kept(tab) == []
    tab.run("Object.keys(localStorage).forEach((key) => key.startsWith('other') && localStorage.removeItem(key))")
    ask(tab, "Again?")
    answered(tab, "Well?", "hop", "Again?", "hop")
    assert tab.run(notice) == ""
    assert [len(chat["messages"]) for chat in kept(tab)] == [4]
    assert tab.complaints() == []


def test_controls_have_accessible_names(tab: Tab) -> None:
    settings(tab, max_tokens=3)
    ask(tab, "Well?")
    tab.wait("!!document.querySelector('.assistant')")
    idle(tab)
    tab.click("#open")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "searchbox", "combobox", "spinbutton", "log", "navigation", "dialog"}
    problems = [
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert len(problems) >= 7
    assert all(name for _, name in problems)
    assert tab.run("document.querySelector('#log').getAttribute('role')") == "log"
    assert tab.run("[...document.querySelectorAll('article h2')].map((one) => one.textContent)") == ["You", "Model"]


def test_thoughts_are_folded_counted_and_told_where_they_are_all(browser: Browser, tmp_path: Path) -> None:
    with running(split(thinker(tmp_path / "model"))) as server:
        tab = browser.tab(f"{server.address}/")
        tab.wait(f"document.querySelector('#model').textContent === '{NAME}'")
        settings(tab, temperature=0)
        ask(tab, QUESTION)
        idle(tab)
        assert texts(tab, ".assistant") == [ANSWER]
        assert tab.run("document.querySelector('.assistant .reasoning div').textContent") == THOUGHT
        assert tab.run("document.querySelector('.assistant .reasoning').open") is False
        assert f"5 tokens, {REASONING_TOKENS} of them thoughts" in under(tab)
        settings(tab, max_tokens=3)
        ask(tab, QUESTION)
        idle(tab)
        assert "all of them thoughts: raise the maximum tokens" in under(tab)
        tab.close()


def test_pictures_are_sent_kept_and_seen(browser: Browser, tmp_path: Path) -> None:
    data = encoded(picture(0))
    (tmp_path / "photo.png").write_bytes(data)
    (tmp_path / "no_photo.png").write_bytes(b"GIF89a")
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    with running(split(build(tmp_path / "model", "gemma3"))) as server:
        tab = browser.tab(f"{server.address}/")
        tab.wait("!document.querySelector('#attach').hidden")
        settings(tab, temperature=0, max_tokens=2)
        choose_file(tab, tmp_path / "no_photo.png", "#photos")
        tab.wait("document.querySelector('#notice').textContent.includes('no_photo.png is not a picture')")
        choose_file(tab, tmp_path / "photo.png", "#photos")
        tab.wait("!!document.querySelector('#pictures canvas')")
        ask(tab, "What is it?")
        tab.wait("document.querySelectorAll('article').length === 2")
        idle(tab)
        assert not tab.run("document.querySelector('[role=alert], #pictures canvas')")
        (body,) = (json.loads(body) for body in tab.posted())
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        assert body["messages"] == [{"role": "user", "content": parts}]
        tab.reload()
        tab.wait("document.querySelector('.user .picture canvas')?.width > 0")
        assert tab.complaints() == []
        tab.close()
