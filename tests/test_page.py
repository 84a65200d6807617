"""The chat page in a real browser: against the real server, and against made-up replies for what
the tiny model can't be made to say."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from beaconkv_gguf.server import Server, server_path

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=20000)  # a busy machine reads a prompt slowly
Page = Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium on the PATH", allow_module_level=True)
try:
    server_path()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.slow

BUDGET, CONTEXT = 256, 2048
STORY = "Tell me a long story about a lighthouse and the people who live near it."
LONG = " ".join(f"Entry {i}: the keeper lit lamp {i * 7}." for i in range(30))  # past the budget


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    with Server(smollm2_path, kv_budget=BUDGET, n_ctx=CONTEXT, threads=2) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def problems() -> list[str]:
    """What the page complained of. A test that provokes errors empties it."""
    return []


@pytest.fixture
def visit(browser: Any, server: Server, problems: list[str]) -> Iterator[Callable[..., Page]]:
    """Opens the page as a first visitor does, with settings that make replies short.

    In the end nobody may have seen an error, and nothing may have been asked of another host.
    """
    contexts, requests = [], []

    def open_page(
        width: int = 1280, height: int = 800, path: str = "/", script: str = "", **options: Any
    ) -> Page:
        settings = {"temperature": 0, "seed": 1, "max_tokens": 24, **options.pop("settings", {})}
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(20000)
        stored = json.dumps(json.dumps(settings))
        context.add_init_script(
            f"if (!localStorage['beaconkv.settings']) localStorage['beaconkv.settings'] = {stored};"
        )
        context.add_init_script(script)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: problems.append(message.text) if message.type == "error" else None,
        )
        page.goto(server.url + path)
        expect(page.locator("#model")).not_to_be_empty()
        return page

    yield open_page
    for context in contexts:
        context.close()
    here = (server.url, "data:", "blob:")
    assert [url for url in requests if not url.startswith(here)] == []
    assert problems == []


def say(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def finish(page: Page) -> None:
    expect(page.locator("#stop")).to_be_hidden(timeout=60000)


def reply(page: Page) -> Any:
    """The text of the last reply."""
    return page.locator(".assistant").last.locator(":scope > .markdown")


def stream(*deltas: dict[str, Any], end: str = "stop", **last: Any) -> str:
    """Server-sent events as the server writes them."""
    chunks: list[dict[str, Any]] = []
    for n, delta in enumerate(deltas, 1):
        timings = {"predicted_n": n, "predicted_per_second": 30.0, "prompt_n": 5}
        choice = {"index": 0, "finish_reason": None, "delta": delta}
        chunks.append({"choices": [choice], "timings": timings})
    chunks.append({"choices": [{"index": 0, "finish_reason": end, "delta": {}}], **last})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answer(page: Page, *deltas: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Make replies up; returns a list that gets the requests."""
    bodies: list[dict[str, Any]] = []

    def fulfill(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        body = stream(*deltas, **options)
        route.fulfill(content_type="text/event-stream; charset=utf-8", body=body)

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", fulfill)
    return bodies


def refuse(page: Page, status: int, **error: Any) -> None:
    body = json.dumps({"error": {"code": status, **error}})
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, content_type="application/json", body=body),
    )


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def gauge(page: Page, name: str) -> Any:
    return page.locator(f"[data-value={name}]")


# Against the real server


def test_a_reply_is_shown_while_it_is_written(visit: Callable[..., Page]) -> None:
    page = visit(settings={"max_tokens": 64})
    say(page, STORY)
    expect(page.locator(".user .text")).to_have_text(STORY)
    expect(page.locator("#prompt")).to_have_value("")
    expect(reply(page)).not_to_be_empty()
    expect(page.locator("#stop")).to_be_visible()  # it is not complete yet
    early = reply(page).inner_text()
    finish(page)
    assert len(reply(page).inner_text()) > len(early)
    expect(page.locator(".meta")).to_have_text(re.compile(r"64 tokens · [\d.]+ tokens/s"))
    expect(page.locator("#title")).to_have_text(re.compile("Tell me a long story"))


def test_stop_keeps_what_was_written(visit: Callable[..., Page], server: Server) -> None:
    page = visit(settings={"max_tokens": 1000})
    say(page, STORY)
    expect(reply(page)).not_to_be_empty()
    page.keyboard.press("Escape")
    finish(page)
    expect(reply(page)).not_to_be_empty()
    expect(page.locator(".ending")).to_contain_text("Stopped.")
    for _ in range(50):  # the server has stopped, too
        if not get(f"{server.url}/slots")[0]["is_processing"]:
            break
        page.wait_for_timeout(100)
    else:
        pytest.fail("the server still writes")


def test_continue_goes_on_where_the_reply_was_cut(visit: Callable[..., Page]) -> None:
    page = visit()
    say(page, STORY)
    finish(page)
    first = reply(page).inner_text()
    expect(page.locator(".ending")).to_contain_text("longest length")
    page.get_by_role("button", name="Continue").click()
    finish(page)
    whole = reply(page).inner_text()
    assert whole.startswith(first.rstrip())
    assert len(whole) > len(first)
    assert whole.count(first.rstrip()) == 1
    expect(page.locator(".meta")).to_contain_text("48 tokens")


def test_a_reply_is_written_again(visit: Callable[..., Page]) -> None:
    page = visit(settings={"temperature": 1.5, "seed": None})
    say(page, STORY)
    finish(page)
    first = reply(page).inner_text()
    page.get_by_role("button", name="Write the reply again").click()
    finish(page)
    assert page.locator(".message").count() == 2
    assert reply(page).inner_text() != first
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_an_edited_message_takes_the_place_of_all_after_it(visit: Callable[..., Page]) -> None:
    page = visit()
    for text in ("What is a lamp?", "And a tower?"):
        say(page, text)
        finish(page)
    page.locator(".user").first.hover()
    page.get_by_role("button", name="Edit and send again").first.click()
    page.get_by_label("Edit the message").fill("What is a boat?")
    page.keyboard.press("Enter")
    finish(page)
    expect(page.locator(".user .text")).to_have_text(["What is a boat?"])
    expect(page.locator(".assistant")).to_have_count(1)
    expect(reply(page)).not_to_be_empty()


def test_chats_outlast_a_reload(visit: Callable[..., Page]) -> None:
    page = visit()
    say(page, "What is a lamp?")
    finish(page)
    text = reply(page).inner_text()
    held = gauge(page, "held").inner_text()
    page.fill("#prompt", "not sent yet")
    page.reload()
    expect(page.locator(".user .text")).to_have_text("What is a lamp?")
    assert reply(page).inner_text() == text
    expect(page.locator("#prompt")).to_have_value("not sent yet")
    expect(gauge(page, "held")).to_have_text(held)


def test_the_gauge_follows_the_cache_past_a_compaction(
    visit: Callable[..., Page], server: Server
) -> None:
    page = visit()
    expect(gauge(page, "logical")).to_have_text("0")
    expect(gauge(page, "compactions")).to_have_text("0")
    say(page, LONG)
    finish(page)
    expect(gauge(page, "compactions")).not_to_have_text("0")
    expect(page.locator(".tile.pulse")).to_have_count(1)
    truth = get(f"{server.url}/slots")[0]["beaconkv"]
    assert truth["n_compact"] > 0
    assert number(gauge(page, "logical").inner_text()) == truth["n_logical"] > BUDGET
    assert number(gauge(page, "held").inner_text()) == truth["n_held"] <= BUDGET
    assert number(gauge(page, "compactions").inner_text()) == truth["n_compact"]
    meter = page.get_by_role("meter", name="Kept in memory")
    assert meter.get_attribute("aria-valuemax") == str(BUDGET)
    assert meter.get_attribute("aria-valuenow") == str(truth["n_held"])
    assert meter.get_attribute("aria-valuetext") == f"{truth['n_held']} of {BUDGET} places"
    saved = [float(gauge(page, n).inner_text().split()[0]) for n in ("bytes", "bytes-full")]
    assert saved == [
        pytest.approx(truth[n] / 2**20, abs=0.06) for n in ("bytes_held", "bytes_full")
    ]
    page.get_by_role("button", name="How this memory works").click()
    expect(page.locator("#explanation")).to_contain_text(f"room for {BUDGET} notes")
    expect(page.locator("#facts")).to_contain_text(f"{truth['n_evicted']:,} tokens")
    assert page.locator(".chart .kept").get_attribute("d").count("L") > 3


def test_a_conversation_that_does_not_fit_is_told_in_plain_words(
    visit: Callable[..., Page], problems: list[str]
) -> None:
    page = visit()
    say(page, LONG * 12)
    finish(page)
    expect(page.locator(".error")).to_contain_text("This conversation is longer than")
    expect(page.locator(".error")).to_contain_text("2,048 fit")
    assert all("status of 400" in problem for problem in problems)
    problems.clear()


def test_a_path_prefix_is_no_obstacle(visit: Callable[..., Page], server: Server) -> None:
    page = visit()
    page.route(
        "**/behind/a/proxy/**",
        lambda route: route.continue_(url=route.request.url.replace("/behind/a/proxy", "")),
    )
    page.goto(f"{server.url}/behind/a/proxy/")
    say(page, "What is a lamp?")
    finish(page)
    expect(reply(page)).not_to_be_empty()


# Against made-up replies


def test_thinking_is_folded_and_told(visit: Callable[..., Page]) -> None:
    page = visit()
    deltas = [{"reasoning_content": f"thought {i} "} for i in range(12)]
    bodies = answer(page, *deltas, {"content": "Ten."})
    say(page, "How many?")
    expect(reply(page)).to_have_text("Ten.")
    thinking = page.locator(".thinking")
    expect(thinking.locator("summary")).to_have_text(re.compile(r"Thought for [\d.]+ s, 12 tokens"))
    expect(thinking.locator(".markdown")).to_be_hidden()
    thinking.locator("summary").click()
    expect(thinking.locator(".markdown")).to_contain_text("thought 11")
    say(page, "Sure?")
    finish(page)
    sent = bodies[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["reasoning_content"].startswith("thought 0")


MARKDOWN = r"""# Sums

It costs $5 and $6, and $\sum_{i=1}^n i$ or \(a^2\).

\[ \int_0^1 x\,dx = \tfrac12 \]

$$
E = mc^2
$$

```python
def f(x): return "<b>"
```

| a | b |
|---|--:|
| 1 | 2 |

A [link](https://example.com/x), ![a picture](https://example.com/x.png), H<sub>2</sub>O, <vector>.
"""


def test_markdown_code_and_latex_are_shown(visit: Callable[..., Page]) -> None:
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    answer(page, *({"content": part} for part in re.findall(r"(?s).{1,7}", MARKDOWN)))
    say(page, "Show me")
    finish(page)
    text = reply(page)
    expect(text.locator("h1")).to_have_text("Sums")
    expect(text.locator(".katex")).to_have_count(4)
    expect(text.locator(".katex-display")).to_have_count(2)
    expect(text).to_contain_text("costs $5 and $6")
    expect(text.locator(".hljs-keyword").first).to_have_text("def")
    expect(text.locator("td").last).to_have_css("text-align", "right")
    expect(text.locator("sub")).to_have_text("2")
    expect(text).to_contain_text("<vector>")
    expect(text.locator("img")).to_have_count(0)
    for link in text.locator("a").all():
        assert link.get_attribute("rel") == "noopener noreferrer"
        assert link.get_attribute("target") == "_blank"
    expect(text.get_by_role("link", name="a picture")).to_have_count(1)
    text.get_by_role("button", name="Copy").click()
    expect(page.locator("#toast")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x): return "<b>"'


ATTACKS = r"""<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>
<svg onload="window.hacked=1"></svg> [a](javascript:window.hacked=1)
<a href="javascript:window.hacked=1">b</a>
<b onclick="window.hacked=1" style="position:fixed;inset:0" class="error" id="send">c</b>
<iframe src="https://example.com"></iframe><form action="https://example.com"><input></form>
$\href{javascript:window.hacked=1}{d}$ $\includegraphics{https://example.com/e.png}$
![f](https://example.com/f.png "g") <style>body{display:none}</style>

<div><img src="https://example.com/h.png"></div>

```html"><img src=x onerror=window.hacked=1>
<script>window.hacked=1</script>
```
"""


def test_nothing_in_a_text_runs_or_loads(visit: Callable[..., Page]) -> None:
    page = visit()
    answer(page, {"reasoning_content": ATTACKS}, {"content": ATTACKS})
    say(page, ATTACKS)
    finish(page)
    page.locator(".thinking summary").click()
    page.locator(".code").first.wait_for()
    for link in page.locator(".markdown a, .markdown b").all():
        link.dispatch_event("click")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    assert (
        page.locator("#log :is(img, script, style, iframe, form, input, svg[onload])").count() == 0
    )
    assert page.locator("#log [href^=javascript], #log [onclick]").count() == 0
    assert page.locator(".markdown :is(b[style], b[class], b[id])").count() == 0
    expect(page.locator(".user .text")).to_contain_text("<script>window.hacked=1</script>")
    expect(reply(page)).to_contain_text("<script>")  # shown, and not run


def test_a_growing_text_leaves_what_is_settled_alone(visit: Callable[..., Page]) -> None:
    page = visit()
    kept = page.evaluate(
        """async (text) => {
            const { MarkdownView } = await import("./markdown.js");
            const root = document.createElement("div");
            const view = new MarkdownView(root);
            for (let end = 0; end <= text.length; end += 40) view.render(text.slice(0, end), false);
            const nodes = [...root.children];
            const open = view.blocks.length - view.firstOpen;
            view.render(text, true);
            const whole = document.createElement("div");
            new MarkdownView(whole).render(text, true);
            return {
                blocks: root.children.length,
                open,
                kept: nodes.filter((node, i) => root.children[i] === node).length,
                same: root.innerHTML === whole.innerHTML,
            };
        }""",
        MARKDOWN * 40,
    )
    assert kept["same"]
    assert kept["open"] <= 4
    assert kept["kept"] >= kept["blocks"] - 4


def test_the_end_is_followed_only_by_who_is_there(visit: Callable[..., Page]) -> None:
    page = visit(height=420, settings={"max_tokens": 150})
    answer(page, {"content": "# -\n" * 20})
    say(page, "Fill the page")
    finish(page)
    top = "document.querySelector('#scroll').scrollTop"
    end = "(s => s.scrollHeight - s.clientHeight - s.scrollTop)(document.querySelector('#scroll'))"
    assert page.evaluate(end) < 2
    page.unroute("**/v1/chat/completions")
    say(page, STORY)
    expect(reply(page)).not_to_be_empty()
    assert page.evaluate(end) < 2
    page.mouse.move(640, 250)
    page.mouse.wheel(0, -600)
    expect(page.locator("#jump")).to_be_visible()
    before = page.evaluate(top)
    finish(page)
    assert page.evaluate(top) == before
    page.click("#jump")
    assert page.evaluate(end) < 2


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (
            400,
            {"type": "exceed_context_size_error", "n_prompt_tokens": 9120, "n_ctx": 8192},
            "it has 9,120 tokens, 8,192 fit",
        ),
        (500, {"type": "server_error", "message": "Out of lamps"}, "Out of lamps"),
    ],
)
def test_a_refusal_is_told_and_loses_nothing(
    visit: Callable[..., Page], problems: list[str], status: int, error: dict[str, Any], words: str
) -> None:
    page = visit()
    refuse(page, status, **error)
    say(page, "My long question")
    expect(page.locator(".error")).to_contain_text(words)
    expect(page.locator(".user .text")).to_have_text("My long question")
    bodies = answer(page, {"content": "Fine."})
    page.get_by_role("button", name="Try again").click()
    expect(reply(page)).to_have_text("Fine.")
    assert bodies[0]["messages"] == [{"role": "user", "content": "My long question"}]
    problems.clear()


def test_a_lost_server_loses_nothing(visit: Callable[..., Page], problems: list[str]) -> None:
    page = visit()
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    say(page, "My question")
    expect(page.locator(".error")).to_contain_text("Is it still running?")
    page.reload()
    expect(page.locator(".user .text")).to_have_text("My question")
    # The next message joins the one that had no reply: many templates refuse two in a row.
    bodies = answer(page, {"content": "Fine."})
    say(page, "Hello?")
    expect(reply(page)).to_have_text("Fine.")
    assert bodies[0]["messages"] == [{"role": "user", "content": "My question\n\nHello?"}]
    problems.clear()


def test_a_reply_that_breaks_off_keeps_its_text(visit: Callable[..., Page]) -> None:
    page = visit()
    body = stream({"content": "Half a "}).split("\n\n")[0] + "\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    say(page, "Go")
    expect(page.locator(".error")).to_contain_text("connection to the server was lost")
    expect(reply(page)).to_have_text("Half a")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_a_model_that_is_being_loaded_is_waited_for(
    visit: Callable[..., Page], problems: list[str]
) -> None:
    page = visit()
    health = iter((503, 200))
    page.route("**/health", lambda route: route.fulfill(status=next(health), json={}))
    refuse(page, 503, type="unavailable_error", message="Loading model")
    say(page, "Hello")
    expect(page.locator(".state")).to_contain_text("The model is being loaded")
    answer(page, {"content": "Here I am."})
    expect(reply(page)).to_have_text("Here I am.")
    problems.clear()


def test_a_key_is_asked_for_and_sent(visit: Callable[..., Page], problems: list[str]) -> None:
    page = visit()
    refuse(page, 401, type="authentication_error", message="Invalid API Key")
    say(page, "Hello")
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    key.fill("secret")
    page.get_by_role("button", name="Done").click()
    answer(page, {"content": "Welcome."})
    with page.expect_request("**/v1/chat/completions") as request:
        page.get_by_role("button", name="Try again").click()
    assert request.value.headers["authorization"] == "Bearer secret"
    expect(reply(page)).to_have_text("Welcome.")
    problems.clear()


def test_settings_are_sent_and_kept(visit: Callable[..., Page], server: Server) -> None:
    page = visit()
    properties = get(f"{server.url}/props")
    properties["chat_template"] += "{% if enable_thinking %}{% endif %}"
    page.route("**/props", lambda route: route.fulfill(json=properties))
    page.reload()
    page.get_by_role("button", name="Settings").click()
    top_p = page.get_by_label("Top p")
    expect(top_p).to_have_attribute("placeholder", "0.95 by default")
    top_p.fill("0.5")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking").select_option("off")
    page.keyboard.press("Escape")
    page.reload()
    bodies = answer(page, {"content": "Yes."})
    say(page, "Hello")
    expect(reply(page)).to_have_text("Yes.")
    (body,) = bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["top_p"] == 0.5
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_k" not in body  # left to the server
    assert body["stream"] and body["timings_per_token"] and body["return_progress"]


def test_a_long_prompt_shows_how_far_it_is_read(visit: Callable[..., Page]) -> None:
    # The bar stands until the first word, so the made-up reply stays without one.
    page = visit()
    progress = {"total": 4000, "cache": 0, "processed": 1000, "time_ms": 2000}
    chunk = {"choices": [{"index": 0, "delta": {}}], "prompt_progress": progress}
    page.add_init_script(
        """const real = fetch;
        fetch = async (path, options) => path !== "v1/chat/completions" ? real(path, options) :
            new Response(new ReadableStream({ start(stream) {
                stream.enqueue(new TextEncoder().encode(`data: CHUNK\\n\\n`));
            } }));""".replace("CHUNK", json.dumps(chunk))
    )
    page.reload()
    say(page, "A long text")
    expect(page.locator(".state")).to_contain_text("Reading 1,000 of 4,000 tokens, 6.0 s left")
    assert page.locator(".state progress").evaluate("bar => bar.position") == 0.25


def test_a_stock_server_has_no_gauge(visit: Callable[..., Page], server: Server) -> None:
    page = visit()
    expect(page.locator("#gauge")).to_be_visible()
    properties = get(f"{server.url}/props")
    del properties["beaconkv"]
    page.route("**/props", lambda route: route.fulfill(json=properties))
    page.reload()
    answer(page, {"content": "Hello."})
    say(page, "Hello")
    expect(reply(page)).to_have_text("Hello.")
    expect(page.locator("#gauge")).to_be_hidden()


def test_without_a_budget_the_gauge_says_so(visit: Callable[..., Page], server: Server) -> None:
    page = visit()
    properties = get(f"{server.url}/props")
    properties["beaconkv"]["budget"] = properties["beaconkv"]["slots"][0]["budget"] = 0
    page.route("**/props", lambda route: route.fulfill(json=properties))
    page.reload()
    expect(gauge(page, "budget")).to_have_text("all of it")
    expect(gauge(page, "compactions")).to_be_hidden()


def test_chats_are_listed_renamed_and_deleted(visit: Callable[..., Page]) -> None:
    page = visit()
    answer(page, {"content": "Hello."})
    chats = page.locator("#chats .chat")
    for text in ("First chat", "Second chat"):
        say(page, text)
        finish(page)
        page.keyboard.press("Control+k")
        expect(page.locator(".message")).to_have_count(0)
    expect(chats).to_have_text(["Second chat", "First chat"])
    chats.last.click()
    expect(page.locator(".user .text")).to_have_text("First chat")
    page.get_by_role("button", name="Rename “First chat”").click()
    page.get_by_label("Title of the chat").fill("Oldest")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Oldest")
    page.get_by_role("button", name="Delete “Oldest”").click()
    expect(chats).to_have_text(["Second chat"])
    page.get_by_role("button", name="Undo").click()
    expect(chats).to_have_text(["Second chat", "Oldest"])
    expect(page.locator(".user .text")).to_have_text("First chat")


def test_two_tabs_keep_each_others_chats(visit: Callable[..., Page]) -> None:
    page = visit()
    answer(page, {"content": "Hello."})
    say(page, "From the first tab")
    finish(page)
    other = page.context.new_page()
    other.goto(page.url)
    answer(other, {"content": "Hello again."})
    say(other, "From the second tab")
    finish(other)
    expect(page.locator(".user .text")).to_have_text(["From the first tab", "From the second tab"])
    expect(reply(page)).to_have_text("Hello again.")


def test_a_chat_leaves_as_a_file_and_comes_back(visit: Callable[..., Page], tmp_path: Path) -> None:
    page = visit()
    answer(page, {"content": "Hello."})
    say(page, "To be kept")
    finish(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this chat").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.name == "To-be-kept.json"
    other = visit()
    other.set_input_files("#import-file", file)
    expect(other.locator(".user .text")).to_have_text("To be kept")
    expect(reply(other)).to_have_text("Hello.")
    file.write_text("{}")
    other.set_input_files("#import-file", file)
    expect(other.locator("#toast")).to_contain_text("holds no chat")


def test_damaged_data_costs_no_more_than_itself(visit: Callable[..., Page]) -> None:
    page = visit()
    answer(page, {"content": "Hello."})
    say(page, "A sound chat")
    finish(page)
    page.evaluate(
        """() => new Promise((resolve) => {
            localStorage["beaconkv.settings"] = "{broken";
            localStorage["beaconkv.theme"] = "{broken";
            indexedDB.open("beaconkv").onsuccess = ({ target }) => {
                const change = target.result.transaction("chats", "readwrite");
                change.objectStore("chats").put({ id: "x", messages: [{ role: 7 }] });
                change.oncomplete = () => { target.result.close(); resolve(); };
            };
        })"""
    )
    page.reload()
    expect(page.locator(".notice")).to_contain_text("One saved chat is damaged")
    expect(page.locator("#chats .chat")).to_have_text(["A sound chat"])
    say(page, "Still here?")
    expect(reply(page)).to_have_text("Hello.")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "IDBObjectStore.prototype.put = function () {"
            "  this.transaction.abort();"
            "  Object.defineProperty(this.transaction, 'error',"
            "    { value: new DOMException('', 'QuotaExceededError') }); }",
            "storage is full",
        ),
        ("delete window.indexedDB; window.indexedDB = undefined", "does not let the page save"),
    ],
)
def test_without_storage_the_page_works_and_says_so(
    visit: Callable[..., Page], script: str, words: str
) -> None:
    page = visit(script=script)
    answer(page, {"content": "Hello."})
    say(page, "Not saved")
    finish(page)
    expect(reply(page)).to_have_text("Hello.")
    expect(page.locator(".notice")).to_contain_text(words)
    expect(page.locator("#chats .chat")).to_have_text(["Not saved"])


# Looks and keys


def test_a_narrow_screen_has_no_sideways_scroll(visit: Callable[..., Page]) -> None:
    page = visit(width=360, height=720)
    wide = (
        f"```\n{'x' * 200}\n```\n\n| {' | '.join('column' for _ in range(12))} |\n|{'---|' * 12}\n"
    )
    answer(
        page,
        {"reasoning_content": "m" * 200},
        {"content": f"{'w' * 200}\n\n{wide}\n\n$$" + "x+" * 60 + "x$$"},
    )
    say(page, "u" * 200)
    finish(page)
    page.locator(".thinking summary").click()
    page.get_by_role("button", name="How this memory works").click()
    page.get_by_role("button", name="List of chats").click()
    expect(page.locator("#new-chat")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.querySelector('#scroll').scrollWidth") <= 360
    for selector in ("#prompt", "#send", "#gauge", "#title"):
        box = page.locator(selector).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360


def lightness(page: Page, selector: str, of: str) -> int:
    color = page.locator(selector).first.evaluate(f"node => getComputedStyle(node).{of}")
    return sum(map(int, re.findall(r"\d+", color)[:3]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_chosen(
    visit: Callable[..., Page], scheme: str
) -> None:
    page = visit(color_scheme=scheme)
    is_light = lightness(page, "body", "backgroundColor") > lightness(page, "body", "color")
    assert is_light == (scheme == "light")
    button = page.get_by_role("button", name="Theme")
    button.click()
    if scheme == "light":
        button.click()
    chosen = "dark" if scheme == "light" else "light"
    expect(button).to_have_accessible_name(f"Theme: {chosen}")
    page.reload()
    expect(button).to_have_accessible_name(f"Theme: {chosen}")
    now_light = lightness(page, "body", "backgroundColor") > lightness(page, "body", "color")
    assert now_light != is_light


def test_everything_is_in_reach_of_the_keyboard(visit: Callable[..., Page]) -> None:
    page = visit()
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.locator("#prompt")).to_have_value("one\ntwo")
    page.locator(".skip").focus()
    seen = []
    while seen[-1:] != ["prompt"]:
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or seen[-1] == "prompt"  # the frame around it shows the focus
    assert seen == [
        *("new-chat", "import", "toggle-sidebar", "theme", "open-settings", "explain"),
        *("scroll", "prompt"),
    ]
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()


def test_every_control_has_a_name(visit: Callable[..., Page]) -> None:
    page = visit()
    answer(page, {"content": "```\ncode\n```"})
    say(page, "Hello")
    finish(page)
    page.get_by_role("button", name="Settings").click()
    controls = page.locator("button, input, select, textarea, [role=meter], [role=log], nav")
    nameless = [
        control.evaluate("node => node.outerHTML.slice(0, 80)")
        for control in controls.all()
        if not control.evaluate(
            "n => n.getAttribute('aria-label') || n.innerText?.trim() || n.textContent.trim()"
            " || n.labels?.length"
        )
    ]
    assert nameless == []


def test_reduced_motion_is_respected(visit: Callable[..., Page]) -> None:
    page = visit(reduced_motion="reduce")
    page.evaluate("document.querySelector('.saw').closest('.tile').classList.add('pulse')")
    timing = "node => getComputedStyle(node).animationTimingFunction"
    assert "steps" in page.locator(".tile.pulse").evaluate(timing)


@pytest.mark.parametrize("text", [">" * 4000, "$" + "{" * 4000 + "}" * 4000 + "$"])
def test_text_that_is_nested_too_deep_is_shown_as_it_is(
    visit: Callable[..., Page], text: str
) -> None:
    page = visit()
    answer(page, {"content": text})
    say(page, "Repeat yourself")
    finish(page)
    assert len(reply(page).inner_text()) >= len(text) // 2
    page.reload()
    expect(page.locator(".user .text")).to_have_text("Repeat yourself")
    expect(page.locator("#model")).not_to_have_text("Not connected")
    expect(page.locator("#send")).to_be_visible()


def test_a_wrong_key_is_called_wrong(visit: Callable[..., Page], problems: list[str]) -> None:
    page = visit()
    refuse(page, 401, message="Invalid API Key", type="authentication_error")
    say(page, "Let me in")
    expect(page.locator("#setting-key-help")).to_have_text("The server asks for a key.")
    page.fill("#setting-key", "wrong")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#setting-key-help")).to_have_text("The server does not accept this key.")
    assert all("status of 401" in problem for problem in problems)
    problems.clear()
