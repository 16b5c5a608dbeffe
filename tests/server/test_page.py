"""What is served for the page, and its modules that need no browser, run by node."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.chat import conversation
from rabbitllm.chat.conversation import Conversation, Exchange, SavedChat
from rabbitllm.server import _app
from tests.server.serving import NAME, Running

STATIC = Path(_app.__file__).parent / "static"
MAX_BYTES = 100_000
"""Of all files together."""
ELSEWHERE = re.compile(
    r"""(?:https?:)?//(?!www\.w3\.org/(?:2000/svg|1998/Math/MathML)")[\w.-]+\.\w|@import|url\(|data:[\w/]+[;,]"""
)


# files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", _app.PAGE)
def test_page_files_have_strict_headers(served: Running, path: str) -> None:
    name, media_type = _app.PAGE[path]
    with served.http as client:
        answer = client.get(f"/{path}")
        assert answer.status_code == 200
        assert answer.content == (STATIC / name).read_bytes()
        assert answer.headers["content-type"] == media_type
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert set(policy.values()) == {"'none'", "'self'"}
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        unchanged = client.get(f"/{path}", headers={"if-none-match": answer.headers["etag"]})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert client.get(f"/{path}", headers={"if-none-match": '"other"'}).status_code == 200
        assert client.head(f"/{path}").headers["etag"] == answer.headers["etag"]


def test_unlisted_files_are_not_served(served: Running) -> None:
    with served.http as client:
        for path in ("/static/", "/static/page.py", "/static/../page.py", "/static/%2e%2e/page.py", "/page.html"):
            assert client.get(path).status_code == 404


def test_every_file_is_listed_and_all_are_small() -> None:
    assert {file.name for file in STATIC.iterdir()} == {name for name, _ in _app.PAGE.values()}
    assert sum(file.stat().st_size for file in STATIC.iterdir()) < MAX_BYTES


def test_page_files_have_no_outside_urls_and_no_html_injection() -> None:
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not ELSEWHERE.findall(text), file.name
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
        if file.suffix == ".html":
            links = set(re.findall(r'(?:src|href)="([^"]*)"', text))
            assert links <= set(_app.PAGE)
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", text)
        for module in re.findall(r'from "([^"]*)"', text):
            assert f"static/{module.removeprefix('./')}" in _app.PAGE


def test_packages_carry_the_files() -> None:
    project = STATIC.parent.parent.parent / "pyproject.toml"
    assert '"rabbitllm.server" = ["static/*"]' in project.read_text(encoding="utf-8")


def test_status_reports_times_of_passes(served: Running) -> None:
    with served.http as client:
        before = client.get("/status").json()
        served.post("/v1/completions", {"prompt": "the rain", "max_tokens": 3, "temperature": 0}).raise_for_status()
        reply = client.get("/status")
    after = reply.json()
    assert reply.headers["cache-control"] == "no-store"
    assert after["model"] == NAME
    assert after["passes"] - before["passes"] >= 3
    assert after["new_tokens"] - before["new_tokens"] == 3
    spent = {name: after[name] - before[name] for name in ("pass_seconds", "disk_seconds", "copy_seconds")}
    assert spent["pass_seconds"] > 0
    assert 0 <= spent["disk_seconds"] + spent["copy_seconds"] <= spent["pass_seconds"]
    placement = after["placement"]
    assert placement["streamed_bytes"] == served.model.placement.streamed_bytes > 0
    assert sum(placement["places"]["disk"].values()) >= placement["streamed_bytes"]
    assert str(served.model.name_or_path) not in reply.text


# modules --------------------------------------------------------------------------------------------------------------

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for file in STATIC.glob("*.js"):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def evaluated(modules: Path, code: str, value: Any = None) -> Any:
    """The result of a script, in which `given` is the value, and which may name exports of the modules."""
    names = {
        "markdown.js": "parse",
        "maths.js": "read",
        "highlight.js": "highlight",
        "pictures.js": "isPicture",
        "chats.js": "beside, choose, decode, encode, encodeAll, matches, messagesOf, Chats",
        "talk.js": "ask, Events, refused, untilWhen",
        "timing.js": "Readings, percentages, took, spent, workOf, duration, size",
    }
    imports = "".join(f'import {{ {exports} }} from "./{file}";\n' for file, exports in names.items())
    script = (
        f"{imports}const given = {json.dumps(value)};\nconsole.log(JSON.stringify(await (async () => {{ {code} }})()));"
    )
    (modules / "script.js").write_text(script, encoding="utf-8")
    done = subprocess.run(["node", "script.js"], cwd=modules, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def paragraph(*spans: Any) -> dict[str, Any]:
    return {"kind": "paragraph", "spans": list(spans)}


def code(text: str, language: str = "") -> dict[str, Any]:
    return {"kind": "code", "language": language, "text": text}


def bullets(*items: Any, ordered: bool = False, start: int = 1) -> dict[str, Any]:
    return {"kind": "list", "ordered": ordered, "start": start, "items": list(items)}


def formula_in(text: str, display: bool = False) -> dict[str, Any]:
    return {"tag": "maths", "text": text, "display": display}


def task(done: bool) -> dict[str, Any]:
    return {"kind": "task", "done": done}


def link(href: str, *spans: Any) -> dict[str, Any]:
    return {"tag": "a", "href": href, "spans": list(spans) or [href]}


MARKDOWN: dict[str, list[dict[str, Any]]] = {
    "": [],
    " one\ntwo \n\nthree": [paragraph("one\ntwo"), paragraph("three")],
    "a **b *c* d** e": [paragraph("a ", {"tag": "strong", "spans": ["b ", {"tag": "em", "spans": ["c"]}, " d"]}, " e")],
    "2 * 3 * 4 and a_b_c": [paragraph("2 * 3 * 4 and a_b_c")],
    "`**x**` and ``a`b``": [paragraph({"tag": "code", "text": "**x**"}, " and ", {"tag": "code", "text": "a`b"})],
    "half **of it": [paragraph("half **of it")],
    "<b>&amp;</b>": [paragraph("<b>&amp;</b>")],
    "# Top #\ntext": [{"kind": "heading", "level": 1, "spans": ["Top"]}, paragraph("text")],
    "#no heading": [paragraph("#no heading")],
    "```py\na = 1\n\n# b\n```\nend": [code("a = 1\n\n# b", "py"), paragraph("end")],
    "~~~\n```\n~~~": [code("```")],
    "```js\nnot over": [code("not over", "js")],
    "- a\n- b\n  - c\n\nend": [
        bullets([paragraph("a")], [paragraph("b"), bullets([paragraph("c")])]),
        paragraph("end"),
    ],
    "3. a\n\n4. b": [bullets([paragraph("a")], [paragraph("b")], ordered=True, start=3)],
    "1. x\n   ```\n   y\n     z\n   ```\n2. w": [
        bullets([paragraph("x"), code("y\n  z")], [paragraph("w")], ordered=True)
    ],
    "> a\n> - b": [{"kind": "quote", "blocks": [paragraph("a"), bullets([paragraph("b")])]}],
    "a\n---\n***": [paragraph("a"), {"kind": "rule"}, {"kind": "rule"}],
    "|a|b|\n|:-|-:|\n|1|2|": [{"kind": "table", "align": ["left", "right"], "rows": [[["a"], ["b"]], [["1"], ["2"]]]}],
    "|a|b|\n|:-:|-|\n|1\\|2|~~3~~|": [
        {
            "kind": "table",
            "align": ["center", ""],
            "rows": [[["a"], ["b"]], [["1|2"], [{"tag": "del", "spans": ["3"]}]]],
        }
    ],
    "a ~~b **c**~~ ~d~": [paragraph("a ", {"tag": "del", "spans": ["b ", {"tag": "strong", "spans": ["c"]}]}, " ~d~")],
    "- [ ] a\n- [x] b\n  - [X] c\n- [x]d\n- [ ]": [
        bullets(
            [task(False), paragraph("a")],
            [task(True), paragraph("b"), bullets([task(True), paragraph("c")])],
            [paragraph("[x]d")],
            [paragraph("[ ]")],
        )
    ],
    '[the **rest**](https://x.org/a_(b)?c=d#e "title")': [
        paragraph(link("https://x.org/a_(b)?c=d#e", "the ", {"tag": "strong", "spans": ["rest"]}))
    ],
    "see https://x.org/q?a=1&b=2. (http://y.org), <https://z.org>!": [
        paragraph(
            "see ", link("https://x.org/q?a=1&b=2"), ". (", link("http://y.org"), "), ", link("https://z.org"), "!"
        )
    ],
    "\u770bhttps://x.org/\u8def\u3002\u597d": [paragraph("\u770b", link("https://x.org/\u8def"), "\u3002\u597d")],
    "**https://x.org/~me** ![a dog](https://x.org/dog.png) `https://x.org`": [
        paragraph(
            {"tag": "strong", "spans": [link("https://x.org/~me")]},
            " ",
            link("https://x.org/dog.png", "a dog"),
            " ",
            {"tag": "code", "text": "https://x.org"},
        )
    ],
    # an address in the words of a link would hide where it leads
    "[https://bank.org](https://x.org) [](https://y.org)": [
        paragraph(link("https://x.org"), " ", link("https://y.org"))
    ],
}
INERT = [
    "[a](javascript:alert(1))",
    "[a](JavaScript:alert(1))",
    "[a](java\tscript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>)",
    "[a](vbscript:x) [b](file:///etc/passwd) [c](blob:https) [d](ftp://x.org) [e](mailto:a@x.org)",
    "[a](//x.org) [b](/v1/models) [c](static/page.js) [d](?a=b) [e](#top)",
    "![a](data:image/png;base64,AA==)",
    "<javascript:alert(1)> javascript://x.org/%0aalert(1)",
    "https://bank.org@x.org/ [a](https://bank.org:443@x.org) <https://a:b@x.org>",
    "https:// http://[ <https://> [a](https://)",
    "[a]: https\\://x.org",
]
"""Texts that have no link."""


@needs_node
def test_markdown(modules: Path) -> None:
    parsed = evaluated(modules, "return given.map((text) => parse(text));", list(MARKDOWN))
    assert dict(zip(MARKDOWN, parsed, strict=True)) == MARKDOWN


@needs_node
@pytest.mark.parametrize("text", INERT)
def test_only_addresses_of_the_web_become_links(modules: Path, text: str) -> None:
    (parsed,) = evaluated(modules, "return given.map((text) => parse(text));", [text])
    assert parsed == [paragraph(text)]


@needs_node
def test_markdown_of_long_and_deep_texts_terminates(modules: Path) -> None:
    """A text of opening marks, and lists in lists, are where parsers take the square of their length, which here would
    be minutes, or all of the stack."""
    marks = ["**a ", "*a ", "`", "``a ", "> ", "- ", "|a", "#", "```\n", "  - a\n", "* * ", "> - ", "1. ", "**"]
    marks += ["[", "![a", "[a](", "[a](https://", "[a](https://x ", "https://", "https://a", "https://.", "https://(a"]
    marks += [
        "<https://a",
        "~~a ",
        "~~",
        "- [x] ",
        "[x] ",
        "|:-",
        "\\|",
        "$",
        "$a ",
        "$$a",
        "\\(",
        "\\[a\n",
        "\\",
        "\n",
    ]
    lengths = evaluated(modules, "return given.map((mark) => parse(mark.repeat(1e5)).length);", marks)
    assert all(lengths[:-1])
    assert lengths[-1] == 0


def row(*children: Any) -> list[Any]:
    return ["mrow", {}, *children]


def letter(text: str) -> list[Any]:
    return ["mi", {}, text]


def digit(text: str) -> list[Any]:
    return ["mn", {}, text]


def sign(text: str, **attributes: str) -> list[Any]:
    return ["mo", attributes, text]


def table(rows: list[list[Any]], **attributes: str) -> list[Any]:
    return ["mtable", attributes, *(["mtr", {}, *(["mtd", {}, row(cell)] for cell in cells)] for cells in rows)]


FORMULAS: dict[str, list[Any] | None] = {
    "x^2": row(["msup", {}, letter("x"), digit("2")]),
    "a_{ij}'": row(["msubsup", {}, letter("a"), row(letter("i"), letter("j")), row(letter("\u2032"))]),
    r"\frac{a}2": row(["mfrac", {}, letter("a"), digit("2")]),
    r"\sqrt[3]{x} - \alpha": row(["mroot", {}, letter("x"), row(digit("3"))], sign("\u2212"), letter("\u03b1")),
    r"\sum_{i}^n i": row(
        ["munderover", {}, sign("\u2211", movablelimits="true", largeop="true"), letter("i"), letter("n")], letter("i")
    ),
    r"\left( x \right]": row(row(sign("(", stretchy="true"), row(letter("x")), sign("]", stretchy="true"))),
    r"x \not= \text{a  {b}}": row(letter("x"), sign("=\u0338"), ["mtext", {}, "a\u00a0b"]),
    r"\mathbb{Rk}": row(
        row(["mi", {"mathvariant": "normal"}, "\u211d"], ["mi", {"mathvariant": "normal"}, "\U0001d55c"])
    ),
    r"a & b \\ c & d \\": table(
        [[letter("a"), letter("b")], [letter("c"), letter("d")]], **{"class": "aligned", "displaystyle": "true"}
    ),
    r"\begin{pmatrix}1 & 2\end{pmatrix}": row(
        row(sign("(", stretchy="true"), table([[digit("1"), digit("2")]], **{"class": ""}), sign(")", stretchy="true"))
    ),
    r"\href{javascript:a}": row(["mtext", {}, "\\href"], row(*map(letter, "javascript"), sign(":"), letter("a"))),
    **dict.fromkeys([r"\frac{1", "}", "a^", r"\left(", r"\begin{a}\end{a}", r"\begin{array}\end{matrix}"]),
    **dict.fromkeys([r"\hat" * 900 + "x", "{" * 40 + "}" * 40, r"\left(" * 40 + r"\right)" * 40, "x" * 5000]),
}
"""What is read of them; nothing of those that are broken, or deeper or longer than any answer's."""


@needs_node
def test_formulas(modules: Path) -> None:
    trees = evaluated(modules, "return given.map((text) => read(text));", list(FORMULAS))
    assert dict(zip(FORMULAS, trees, strict=True)) == FORMULAS


MARKDOWN_WITH_MATHS: dict[str, list[dict[str, Any]]] = {
    r"so $x$, \(y\) and \$5": [paragraph("so ", formula_in("x"), ", ", formula_in("y"), " and ", "$", "5")],
    "from $5 to $10, `$x$`, a$b$c, $ x $": [
        paragraph("from $5 to $10, ", {"tag": "code", "text": "$x$"}, ", a$b$c, $ x $")
    ],
    "so\n$$\nx\n+ 1\n$$.\nend": [paragraph("so"), {"kind": "maths", "text": "x\n+ 1."}, paragraph("end")],
    r"\[ x \] ": [{"kind": "maths", "text": "x"}],
    "a $$x$$ b": [paragraph("a ", formula_in("x", display=True), " b")],
    "$$\nnot over": [paragraph("$$\nnot over")],
    "- a\n  $$x$$": [bullets([paragraph("a"), {"kind": "maths", "text": "x"}])],
}


@needs_node
def test_formulas_in_markdown(modules: Path) -> None:
    parsed = evaluated(modules, "return given.map((text) => parse(text));", list(MARKDOWN_WITH_MATHS))
    assert dict(zip(MARKDOWN_WITH_MATHS, parsed, strict=True)) == MARKDOWN_WITH_MATHS


COLOURED: list[tuple[str, str, list[list[str]]]] = [
    (
        "python",
        'def f(a):  # "b"\n    return 0x1f',
        [["word", "def"], ["name", "f"], ["comment", '# "b"'], ["word", "return"], ["number", "0x1f"]],
    ),
    ("py", '"""a\n# b', [["string", '"""a\n# b']]),
    (
        "C++",
        '#include <a>\n/* a\nb */ int x = g("\\"");',
        [["word", "#include"], ["comment", "/* a\nb */"], ["word", "int"], ["name", "g"], ["string", '"\\""']],
    ),
    ("rust", "fn s<'a>(c: &'a u8) == 'x'", [["word", "fn"], ["string", "'x'"]]),
    (
        "bash",
        'echo "$A" --quiet a#b # c',
        [["word", "echo"], ["string", '"$A"'], ["name", "--quiet"], ["comment", "# c"]],
    ),
    ("json", '{"a": [1, true, "b"]}', [["name", '"a"'], ["number", "1"], ["word", "true"], ["string", '"b"']]),
    ("sql", "SELECT a -- b", [["word", "SELECT"], ["comment", "-- b"]]),
    ("lua", "local a -- b", [["word", "local"], ["comment", "-- b"]]),
    (
        "html",
        '<a href="b">c</a><!-- d\n-->',
        [
            ["word", "<a"],
            ["name", "href"],
            ["string", '"b"'],
            ["word", ">"],
            ["word", "</a"],
            ["word", ">"],
            ["comment", "<!-- d\n-->"],
        ],
    ),
    ("css", "a { color: #fff }", [["name", "color"], ["number", "#fff"]]),
    ("diff", "+a\n-b\n@@ c", [["added", "+a"], ["removed", "-b"], ["name", "@@ c"]]),
    ("no such language", "if 1", []),
    ("", "if 1", []),
]


@needs_node
def test_code_is_coloured(modules: Path) -> None:
    pieces = evaluated(modules, "return given.map(([language, text]) => highlight(text, language));", COLOURED)
    for (language, text, coloured), shown in zip(COLOURED, pieces, strict=True):
        assert "".join(piece for _, piece in shown) == text
        assert [[kind, piece] for kind, piece in shown if kind] == coloured, language


@needs_node
def test_code_of_hostile_texts_is_coloured_in_time(modules: Path) -> None:
    marks = [
        '"',
        "'",
        "`",
        '\\"',
        '"a',
        '"""',
        "/*",
        "/* *",
        "a",
        "a ",
        "1",
        "1e",
        "<!--",
        "<a ",
        "#",
        "#a",
        " ",
        "--",
        "$",
        "-",
        "\n",
        "a:",
    ]
    seconds = evaluated(
        modules,
        """
        const languages = ["c", "rust", "python", "bash", "json", "sql", "lua", "html", "css", "diff"];
        return given.flatMap((mark) => languages.map((language) => {
          const started = performance.now();
          const text = mark.repeat(30_000 / mark.length);
          if (highlight(text, language).map(([, piece]) => piece).join("") !== text) throw new Error(mark);
          return [(performance.now() - started) / 1000, mark, language];
        })).sort(([a], [b]) => b - a)[0];
        """,
        marks,
    )
    assert seconds[0] < 1, seconds


HOSTILE_PIECES = ["<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<math href=x>"]
HOSTILE_PIECES += ["<a href=javascript:a>", "&lt;", '"onclick="', "[a](javascript:a)", "[a](https://x.org/", "![b]("]
HOSTILE_PIECES += ["](", ")", 'https://x.org/"onclick=1', "<https://", "javascript://a", "data:text/html,a", "`"]
HOSTILE_PIECES += ["```html\n", "```\n", "~~~", "\n---\n", "**", "*", "~~", "_", "|", "\n|-|:-:|\n", "\n\n", "\n"]
HOSTILE_PIECES += ["- ", "1. ", "> ", "# ", "    ", "- [x] ", "$", "$$", "\n$$\n", r"\(", r"\)", r"\[", r"\]", "\\"]
HOSTILE_PIECES += ["{", "}", "^", "_", "&", "\\\\", r"\href{javascript:a}{b}", r"\text{<b>}", r"\begin{array}{c}"]
HOSTILE_PIECES += [r"\end{array}", r"\frac", r"\sqrt[", r"\left(", r"\right)", r"\mathbb{<i>}", r"\not", r"\hat"]
HOSTILE_PIECES += [r"\style{a}{b}", "__proto__", r"\constructor", r"\begin{constructor}", "```constructor\n"]
HOSTILE_PIECES += ["\u202e", "\x00", "\ud83d\udc07", "\u05e9"]


def hostile_texts(count: int) -> list[str]:
    """Texts put together by chance."""
    chance = random.Random(55)
    return ["".join(chance.choices(HOSTILE_PIECES, k=chance.randrange(2, 40))) for _ in range(count)]


MATHML = "mrow|mi|mn|mo|mtext|mspace|msub|msup|msubsup|munder|mover|munderover|mfrac|msqrt|mroot|mtable|mtr|mtd"
ATTRIBUTES = "mathvariant|stretchy|movablelimits|largeop|[lr]space|width|accent|linethickness|class|displaystyle"


@needs_node
def test_hostile_texts_yield_only_known_elements(modules: Path) -> None:
    blocks = evaluated(modules, "return given.map((text) => [parse(text), read(text)]);", hostile_texts(3000))
    kinds, tags, formulas = set(), set(), 0

    def check(part: Any) -> None:
        if isinstance(part, list):
            for inner in part:
                check(inner)
        elif isinstance(part, dict):
            kinds.add(part.get("kind"))
            tags.add(part.get("tag"))
            assert re.match(r"https?://[^/@]+/?", part.get("href", "https://x"))
            for inner in part.values():
                check(inner)

    def check_formula(tree: Any) -> None:
        if isinstance(tree, str):
            return
        tag, attributes, *children = tree
        assert re.fullmatch(MATHML, tag)
        assert all(re.fullmatch(ATTRIBUTES, name) for name in attributes)
        assert all(re.fullmatch(r"[\w.-]*", value) for value in attributes.values())
        for child in children:
            check_formula(child)

    for parsed, tree in blocks:
        check(parsed)
        if tree is not None:
            formulas += 1
            check_formula(tree)
    assert kinds == {None, "paragraph", "code", "heading", "rule", "list", "quote", "table", "task", "maths"}
    assert tags == {None, "a", "strong", "em", "del", "code", "maths"}
    assert formulas > 100


@needs_node
def test_events_are_parsed_across_network_chunks(modules: Path) -> None:
    stream = 'data: {"a": 1}\r\n\r\n: waiting\n\ndata:two\ndata: lines\n\nevent: x\ndata: ä\n\ndata: [DONE]\n\n'
    expected = ['{"a": 1}', "two\nlines", "ä", "[DONE]"]
    parsed_events = evaluated(
        modules,
        """
        const cut = (...at) => {
          const events = new Events();
          const ends = [0, ...at, given.length];
          return ends.slice(1).flatMap((end, i) => events.feed(given.slice(ends[i], end)));
        };
        const all = [cut(), cut(...Array.from(given, (_, i) => i))];
        for (let i = 0; i <= given.length; i++) all.push(cut(i));
        return all;
        """,
        stream,
    )
    assert all(events == expected for events in parsed_events)


BROKEN = {
    'data: {"choices": [{"delta": {"content": "a"}}]}\n\n': "The connection was lost. The partial answer is kept.",
    'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"error": {"message": "No disk."}}\n\n': (
        "The server ended the answer. No disk."
    ),
    'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: <html>\n\n': (
        "The server sent an invalid reply. The partial answer is kept."
    ),
}


@needs_node
def test_reasoning_is_separate_from_text(modules: Path) -> None:
    deltas = [{"reasoning_content": "so"}, {"content": "a"}, {"reasoning_content": "b", "content": "c"}]
    stream = (
        "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas) + "data: [DONE]\n\n"
    )
    pieces = evaluated(
        modules,
        """
        globalThis.fetch = async () => new Response(given);
        const came = [];
        for await (const event of ask({}, { key: "", signal: new AbortController().signal })) came.push(event);
        return came;
        """,
        stream,
    )
    assert pieces == [{"reasoning": "so"}, {"text": "a"}, {"reasoning": "b"}, {"text": "c"}]


@needs_node
def test_broken_stream_keeps_partial_text_and_error(modules: Path) -> None:
    stream = evaluated(
        modules,
        """
        const told = async (stream) => {
          globalThis.fetch = async () => new Response(stream);
          const came = [];
          try {
            for await (const event of ask({}, { key: "", signal: new AbortController().signal })) came.push(event);
          } catch (error) {
            return [came, error.message];
          }
        };
        const all = [];
        for (const stream of given) all.push(await told(stream));
        return all;
        """,
        list(BROKEN),
    )
    assert stream == [[[{"text": "a"}], words] for words in BROKEN.values()]


@needs_node
def test_error_messages_of_refusals(modules: Path) -> None:
    messages = evaluated(
        modules,
        """
        const now = Date.parse("2026-01-01T00:00:00Z");
        return given.map((one) => {
          const trouble = refused(...one, now);
          return [trouble.message, trouble.wantsKey, trouble.until && (trouble.until - now) / 1000];
        });
        """,
        [
            [429, "64 run.", "7"],
            [503, "Shutting down.", "Thu, 01 Jan 2026 00:01:00 GMT"],
            [401, "No key.", None],
            [400, "Too long.", "soon"],
            [418, "", None],
            [500, "Sorry.", None],
        ],
    )
    assert messages == [
        ["The server's request queue is full.", False, 7],
        ["The server is not available. Shutting down.", False, 60],
        ["This server requires an API key.", True, None],
        ["The server refused the request. Too long.", False, None],
        ["The server refused the request. (HTTP 418)", False, None],
        ["The server failed. Sorry.", False, None],
    ]


CONVERSATIONS = [
    Conversation(),
    Conversation("Be brief.", (Exchange("Hello?", "Yes <b>\n```"), Exchange("مرحبا", "", True))),
    Conversation(None, (Exchange("a", "b \U0001f407", True), Exchange("c", "d", reasoning="Why <c>?\n"))),
]


@needs_node
def test_saved_chats_round_trip_between_command_and_page(modules: Path) -> None:
    files = [conversation.encode(SavedChat("org/model", turns)).decode() for turns in CONVERSATIONS]
    returned = evaluated(modules, 'return given.map((text) => encode(decode(text)[0], "org/model"));', files)
    assert [conversation.decode(text.encode(), "file") for text in returned] == [
        SavedChat("org/model", turns) for turns in CONVERSATIONS
    ]


def question(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def reply(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


BRANCHED = """
const q = (content) => ({ role: "user", content });
const a = (content) => ({ role: "assistant", content });
const chat = { title: "T", system: "Be brief.", messages: [q("one"), a("1"), q("two"), a("2")] };
const seen = () => chat.messages.map(({ content }) => content).join(" ");
const put = (at, ...messages) => {
  const tail = chat.messages.splice(at);
  beside(tail, messages[0]);
  chat.messages.push(...messages);
};
put(3, a("2b"));             // another answer
put(2, q("TWO"), a("2c"));   // another question, which leaves the two answers behind
put(0, q("ONE"), a("1b"));
"""
"""A conversation of which three messages have two versions each."""


@needs_node
def test_versions_are_kept_and_chosen(modules: Path) -> None:
    seen = evaluated(
        modules,
        BRANCHED
        + """
        const steps = [seen()];
        for (const [at, version] of [[0, 0], [2, 0], [3, 0], [3, 1], [2, 1], [0, 1], [0, 0]]) {
          choose(chat, at, version);
          steps.push(seen());
        }
        put(2, q("three"), a("3"));
        const lengths = chat.messages[2].branches.map((tail) => tail?.length ?? 0);
        return [...steps, seen(), lengths, "branches" in chat.messages[1]];
        """,
    )
    assert seen == [
        "ONE 1b",
        "one 1 TWO 2c",
        "one 1 two 2b",
        "one 1 two 2",
        "one 1 two 2b",
        "one 1 TWO 2c",
        "ONE 1b",
        "one 1 TWO 2c",
        "one 1 three 3",
        [2, 2, 0],
        False,
    ]


@needs_node
def test_files_have_all_versions_and_pictures(modules: Path) -> None:
    chat, returned, text, every = evaluated(
        modules,
        BRANCHED
        + """
        choose(chat, 0, 0);
        chat.messages[0].pictures = ["data:image/png;base64,AAAA"];
        const text = encode(chat, "m");
        return [chat, decode(text)[0], text, decode(encodeAll([chat, { ...chat, title: "U" }], "m"))];
        """,
    )
    assert returned == chat
    assert every == [chat, {**chat, "title": "U"}]
    read = conversation.decode(text.encode(), "file").conversation
    assert read == Conversation("Be brief.", (Exchange("one", "1"), Exchange("TWO", "2c")))


@needs_node
def test_a_file_shows_an_answered_version(modules: Path) -> None:
    """A question without an answer is no part of a file, another version of it is."""
    texts = evaluated(
        modules,
        BRANCHED + "choose(chat, 0, 0); put(2, q('three')); const text = encode(chat, 'm'); return [text, seen()];",
    )
    assert texts[1] == "one 1 three"
    assert conversation.decode(texts[0].encode(), "file").conversation.exchanges == (
        Exchange("one", "1"),
        Exchange("two", "2b"),
    )


@needs_node
def test_search_finds_words_of_all_versions(modules: Path) -> None:
    queries = [[], ["one"], ["2b", "t"], ["2c", "two", "one"], ["three"], ["one", "three"]]
    answers = evaluated(modules, BRANCHED + "return given.map((words) => matches(chat, words));", queries)
    assert answers == [True, True, True, True, False, False]


@needs_node
def test_pictures_are_sent_as_parts(modules: Path) -> None:
    url = "data:image/png;base64,AAAA"
    chat = {"system": "", "messages": [question("What is it?", pictures=[url]), reply("A dog.", branches=[None])]}
    assert evaluated(modules, "return messagesOf(given);", chat) == [
        question([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]),
        reply("A dog."),
    ]
    others = [
        "data:image/svg+xml;base64,AAAA",
        "https://x.org/a.png",
        "data:image/png;base64,A\n",
        "data:text/html,a",
        1,
    ]
    shown = evaluated(modules, "return given.map(isPicture);", [url, *others])
    assert shown == [True, *[False] * len(others)]


REFUSALS = """
return given.map((text) => { try { decode(text); return null; } catch (error) { return error.message; } });
"""
"""The message about each file; null for one that is read."""
NOT_READ = {
    "no list of versions": [question("a", branches={}), reply("b")],
    "all versions elsewhere": [question("a", branches=[[question("c")]]), reply("b")],
    "two versions shown": [question("a", branches=[None, None]), reply("b")],
    "an empty version": [question("a", branches=[None, []]), reply("b")],
    "a version of the other's": [question("a", branches=[None, [reply("c")]]), reply("b")],
    "versions of a version": [question("a", branches=[None, [question("c", branches=[None])]]), reply("b")],
    "an outside picture": [question("a", pictures=["https://x.org/a.png"]), reply("b")],
    "an answer's picture": [question("a"), reply("b", pictures=["data:image/png;base64,AAAA"])],
}


@needs_node
def test_wrong_versions_and_pictures_are_refused(modules: Path) -> None:
    files = [file_of(messages=messages) for messages in NOT_READ.values()]
    for name, message in zip(NOT_READ, evaluated(modules, REFUSALS, files), strict=True):
        assert re.match("message [12] (is not|has)", message or ""), name


@needs_node
def test_deep_versions_are_refused(modules: Path) -> None:
    messages = [question("a"), reply("b")]
    for _ in range(150):
        messages = [question("a", branches=[None, [question("c"), reply("d"), *messages]]), reply("b")]
    code = "try { return decode(given); } catch (error) { return error.message; }"
    assert "versions that are none" in evaluated(modules, code, file_of(messages=messages))


@needs_node
def test_unanswered_question_is_not_saved(modules: Path) -> None:
    chat = {"title": "", "system": " ", "messages": [{"role": "user", "content": "Well?"}]}
    text = evaluated(modules, 'return encode(given, "m");', chat)
    assert conversation.decode(text.encode(), "file").conversation == Conversation()


def file_of(**changes: Any) -> str:
    document = {"format": conversation.FORMAT, "version": 1, "model": "m", "messages": []}
    return json.dumps({**document, **changes})


REFUSED = {
    "no JSON": "{",
    "a list": "[]",
    "another format": file_of(format="other"),
    "no version": file_of(version=None),
    "a later version": file_of(version=2),
    "no messages": file_of(messages={}),
    "an answer first": file_of(messages=[{"role": "assistant", "content": "a"}]),
    "a question last": file_of(messages=[{"role": "user", "content": "a"}]),
    "two questions": file_of(messages=[{"role": "user", "content": "a"}] * 2),
    "no text": file_of(messages=[{"role": "user", "content": 1}, {"role": "assistant", "content": "a"}]),
    "half a character": file_of(messages=[{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": ""}]),
    "stopped is a number": file_of(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "stopped": 1}]
    ),
    "reasoning is no text": file_of(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": None}]
    ),
    "a message is null": file_of(messages=[None, None]),
}


@needs_node
def test_page_refuses_the_same_files_as_the_command(modules: Path) -> None:
    words = evaluated(modules, REFUSALS, list(REFUSED.values()))
    for (name, text), message in zip(REFUSED.items(), words, strict=True):
        assert message, name
        with pytest.raises(conversation.ChatFileError):
            conversation.decode(text.encode(), name)


@needs_node
def test_shares_are_differences_of_readings(modules: Path) -> None:
    def reading(passes: int, seconds: float, disk: float, copies: float, nbytes: int) -> dict[str, float]:
        sums = {"pass_seconds": seconds, "disk_seconds": disk, "copy_seconds": copies, "streamed_bytes": nbytes}
        return {"passes": passes, **sums}

    first, second = reading(4, 40.0, 20.0, 10.0, 400), reading(8, 48.0, 26.0, 11.0, 800)
    other = {**second, "model": "other"}
    shares = evaluated(
        modules,
        """
        const after = (readings) => { const r = new Readings(); readings.forEach((one) => r.add(one)); return r.work; };
        return given.map(after);
        """,
        [[], [reading(0, 0, 0, 0, 0)], [first], [first, first, second, second], [second, first], [first, other]],
    )
    since_begin = {"passes": 4, "seconds": 40, "disk": 20, "copies": 10, "computing": 10, "bytes": 400, "recent": False}
    between = {"passes": 4, "seconds": 8, "disk": 6, "copies": 1, "computing": 1, "bytes": 400, "recent": True}
    of_other = since_begin | {"passes": 8, "seconds": 48, "disk": 26, "copies": 11, "computing": 11, "bytes": 800}
    assert shares == [None, None, since_begin, between, since_begin, of_other]


@needs_node
def test_time_of_an_answer_is_told(modules: Path) -> None:
    first = {"passes": 4, "pass_seconds": 40, "disk_seconds": 20, "copy_seconds": 10, "streamed_bytes": 4e6}
    last = {"passes": 8, "pass_seconds": 48, "disk_seconds": 26, "copy_seconds": 11, "streamed_bytes": 8e6}
    last |= {"new_tokens": 6, "drafted_tokens": 5, "accepted_tokens": 2, "forced_tokens": 1, "running": 1, "waiting": 0}
    took = {"tokens": 6, "first": 2, "seconds": 8, "prompt": 1204, "cached": 1100}
    lone, shared, timed = evaluated(
        modules,
        """
        const [first, last, took] = given;
        const work = workOf(first, last, 6);
        const none = workOf(first, first, 6) ?? workOf(first, { ...last, model: "other" }, 6);
        return [spent({ ...took, work }), workOf(first, last, 5).shared, spent({ ...took, work: none })];
        """,
        [first, last, took],
    )
    begun = [
        ["first token", "after 2 s; the prompt has 1,204 tokens, 1,100 of them in the prefix cache"],
        ["the others", "in 6 s"],
    ]
    assert timed == begun
    assert lone == [
        *begun,
        ["passes", "4: 2 s each, 1.00 MB read or copied"],
        ["of their time", "disk 75 %, copies 13 %, computing 12 %"],
        ["tokens a pass", "1.50"],
        ["drafts", "2 of 5 tokens accepted"],
        ["forced", "1 token without a pass"],
    ]
    assert shared is True


@needs_node
def test_percentages_add_up(modules: Path) -> None:
    shares = evaluated(modules, "return given.map(percentages);", [[1, 1, 1], [5, 0, 0], [1, 2, 4], [0.1, 999, 0.1]])
    assert shares == [[34, 33, 33], [100, 0, 0], [14, 29, 57], [0, 100, 0]]


@needs_node
def test_numbers_are_formatted(modules: Path) -> None:
    texts = evaluated(
        modules,
        """
        return [took({ tokens: 11, first: 2, seconds: 7 }),
                took({ tokens: 11, thoughts: 6, first: 2, seconds: 7 }),
                took({ tokens: 1, about: true, first: 75.2, seconds: 75.2 }),
                duration(3723), duration(0.25), duration(12.4), size(3e6), size(450000), size(17)];
        """,
    )
    assert texts == [
        "11 tokens · 2.00 a second · first after 2 s",
        "11 tokens, 6 of them thoughts · 2.00 a second · first after 2 s",
        "about 1 token · first after 1:15 min",
        "1:02 h",
        "250 ms",
        "12 s",
        "3.00 MB",
        "0.45 MB",
        "17 bytes",
    ]
