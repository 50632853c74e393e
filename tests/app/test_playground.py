"""The pages: what they are made of, and, where there is a Chromium, what a person sees who uses them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from app.playground import pages
from app.replica import TAG_BITS, _join_origins, _split
from engine.schemas import StepTokens
from tests.app.dummy import Service, dummy_service
from tests.app.edge import ANSWER, ScriptedRouter, events, http
from tests.app.test_ingress import served

expect.set_options(timeout=60_000)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser_test = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")
PATHS = ("/", "/live")


# --- without a browser


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_is_one_file_and_may_fetch_from_its_own_server_only(path: str) -> None:
    async with http(ScriptedRouter()) as client:
        response = await client.get(path)
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    loading = [
        (tag, attributes)
        for tag, attributes in Elements(response.text).found
        if "src" in attributes or "style" in attributes or tag in ("link", "iframe", "object", "embed")
    ]
    assert loading == [("link", {"rel": "icon", "href": "data:,"})]
    assert not re.search(r"https?://|innerHTML|\beval\b", response.text)
    labelled = {attributes["for"] for tag, attributes in Elements(response.text).found if tag == "label" and attributes}
    ids = {attributes["id"] for _, attributes in Elements(response.text).found if "id" in attributes}
    assert labelled <= ids


@pytest.mark.parametrize("path", PATHS)
async def test_without_the_key_a_browser_gets_the_page_that_asks_for_it_and_others_the_error(path: str) -> None:
    async with http(ScriptedRouter(api_key="k")) as client:
        browser = await client.get(path, headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        other = await client.get(path)
        wrong = await client.get(path, headers={"Accept": "text/html", "X-API-Key": "x"})
        right = await client.get(path, headers={"Accept": "text/html", "X-API-Key": "k"})
        elsewhere = await client.get("/metrics", headers={"Accept": "text/html"})
    assert browser.status_code == 401 and browser.content == right.content == pages()[path].html
    assert browser.headers["www-authenticate"] == "Bearer"
    assert (other.status_code, other.json()["error"]["code"]) == (401, "missing_api_key")
    assert wrong.status_code == 403 and wrong.json()["error"]["code"] == "invalid_api_key"
    assert right.status_code == 200
    assert elsewhere.status_code == 401 and elsewhere.headers["content-type"] == "application/json"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with dummy_service(max_model_len=512, speculation="ngram", gamma=4) as service:
        yield service


def test_a_stream_says_which_tokens_a_draft_proposed(service: Service) -> None:
    body = {"messages": [{"role": "user", "content": "abcabcabc"}], "temperature": 0, "max_tokens": 150}
    asked = {**body, "stream": True, "return_token_origins": True, "logprobs": True}
    before = service.engine.speculation_stats().accepted
    with httpx.Client(base_url=service.url, timeout=60) as client:
        stream = client.post("/v1/chat/completions", json=asked)
        refused = client.post("/v1/chat/completions", json={**body, "return_token_origins": True})
        plain = client.post("/v1/chat/completions", json={**body, "stream": True})
    choices = [json.loads(data)["choices"][0] for _, data in events(stream.text) if data != "[DONE]"]
    origins = [origin for choice in choices for origin in choice.get("token_origins", [])]
    assert len(origins) == 150 == sum(len((choice["logprobs"] or {}).get("content", [])) for choice in choices)
    accepted = service.engine.speculation_stats().accepted
    assert Counter(origins)["draft"] > 10 and set(origins) == {"target", "draft"}
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_token_origins"
    assert "token_origins" not in plain.text and accepted - before >= Counter(origins)["draft"]


def test_origins_stay_with_their_tokens_when_steps_are_merged_or_split() -> None:
    def step(tags: list[int], counts: list[int], tokens: list[int], origins: list[int] | None) -> StepTokens:
        arrays = np.array(tags, np.int64), np.array(counts, np.int32), np.array(tokens, np.int32)
        return StepTokens(*arrays, origins=None if origins is None else np.array(origins, np.int8))

    one, two = 1 << TAG_BITS, 2 << TAG_BITS
    parts = dict(_split(step([one, two, one + 1], [2, 3, 1], [10, 11, 20, 21, 22, 12], [1, 0, 2, 2, 0, 1])))
    assert parts[1].origins is not None and parts[1].origins.tolist() == [1, 0, 1]
    assert parts[2].origins is not None and parts[2].origins.tolist() == [2, 2, 0]
    assert _join_origins([step([one], [2], [1, 2], None)]) is None
    joined = _join_origins([step([one], [2], [1, 2], None), parts[2]])
    assert joined is not None and joined.tolist() == [0, 0, 2, 2, 0]


# --- in a browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=120_000
        )
        yield browser
        browser.close()


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    with chromium.new_context() as context:
        context.set_default_timeout(20_000)
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab; at the end, its console must hold no error but those the test has taken out of `page.complaints`."""
    page = context.new_page()
    complaints: list[str] = []
    page.complaints = complaints  # type: ignore[attr-defined]
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    assert complaints == []


def expect_status(page: Any, *statuses: int) -> None:
    """Chromium itself complains of each response with one of these; nothing else may have been said."""
    await_that(page, lambda: len(page.complaints) >= len(statuses))
    assert [int(text.rpartition("status of ")[2][:3]) for text in page.complaints] == list(statuses)
    page.complaints.clear()


def await_that(page: Page, happens: Callable[[], bool], seconds: int = 20) -> None:
    """Unlike `time.sleep`, lets Playwright hear of what happens in the tab."""
    deadline = time.monotonic() + seconds
    while not happens() and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    assert happens()


def answers(page: Page) -> list[str]:
    return page.locator("article.assistant .text").all_inner_texts()


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def axe(page: Page, *schemes: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for scheme in schemes or ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


@browser_test
def test_send_stream_and_reload(page: Page) -> None:
    router = ScriptedRouter()
    with served(router) as url:
        page.goto(url)
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Most tokens").fill("60")
        page.get_by_label("Message").fill("What is the")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("capital of France?")
        page.keyboard.press("Enter")
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
        expect(page.locator("article.user .text")).to_have_text("What is the\ncapital of France?")
        facts = page.locator("article .facts")
        expect(facts).to_contain_text(f"{len(ANSWER)} tokens · complete · first token after ")
        expect(page.get_by_role("status")).to_contain_text("Answer ended")
        ask(page, "And of Spain?")
        expect(facts).to_have_count(2)
        said = [request.prompt_ids for request in router.requests]
        chat = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is the\ncapital of France?"},
        ]
        assert said[0] == router.tokenizer.encode_chat(chat)
        chat += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And of Spain?"}]
        assert said[1] == router.tokenizer.encode_chat(chat)
        assert [(request.temperature, request.max_new_tokens) for request in router.requests] == [(0.5, 60)] * 2
        page.reload()
        expect(page.get_by_label("Temperature")).to_have_value("0.5")
        assert answers(page) == [ANSWER, ANSWER]
        axe(page)
        page.get_by_role("button", name="New chat").click()
        page.reload()
        assert answers(page) == []


@browser_test
@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop(page: Page, how: str) -> None:
    router = ScriptedRouter()
    router.gate, router.free_tokens = asyncio.Event(), 11
    with served(router) as url:
        page.goto(url)
        ask(page, "Go on")
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER[:11])  # shown while the rest is to come
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        axe(page, "light")
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press(how)
        expect(page.locator("article .facts")).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        await_that(page, lambda: router.aborted == 1)
        assert answers(page) == [ANSWER[:11]]


@browser_test
def test_a_new_chat_has_nothing_of_an_answer_that_was_on_its_way(page: Page) -> None:
    router = ScriptedRouter()
    router.gate, router.free_tokens = asyncio.Event(), 11
    with served(router) as url:
        page.goto(url)
        ask(page, "first")
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER[:11])
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        assert answers(page) == []
        router.free_tokens = 1000
        ask(page, "second")
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
        assert router.requests[-1].prompt_ids == router.tokenizer.encode_chat([{"role": "user", "content": "second"}])


@browser_test
def test_a_reload_during_an_answer_gives_the_message_back(page: Page) -> None:
    router = ScriptedRouter()
    router.gate, router.free_tokens = asyncio.Event(), 11
    with served(router) as url:
        page.goto(url)
        ask(page, "a long question")
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER[:11])
        page.get_by_label("by probability").check()
        page.reload()
        expect(page.get_by_label("Message")).to_have_value("a long question")
        assert page.locator("article").count() == 0
        router.free_tokens = 1000
        page.get_by_role("button", name="Send").click()
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
        page.reload()
        expect(page.get_by_label("Message")).to_have_value("")
        assert answers(page) == [ANSWER]


@browser_test
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("settings", '{"penalty": "1", "length": "2"}'),
        ("settings", "null"),
        *(("conversation", value) for value in ("{}", "not JSON", "null", '["hi"]')),
    ],
)
def test_what_another_page_has_kept_does_no_harm(page: Page, name: str, value: str) -> None:
    with served(ScriptedRouter()) as url:
        page.goto(url)
        page.evaluate("([name, value]) => sessionStorage.setItem(name, value)", [name, value])
        page.reload()
        ask(page, "x")
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER)


@browser_test
def test_models_that_have_changed_are_listed_anew(page: Page) -> None:
    router = ScriptedRouter()
    with served(router) as url:
        page.goto(url)
        model = page.get_by_label("Model")
        expect(model).to_have_value("Tiny")
        router.config = router.config.model_copy(update={"served_model_name": "large", "model_aliases": []})
        ask(page, "x")
        expect(page.get_by_role("alert")).to_contain_text("No such model: Tiny")
        expect_status(page, 404)
        expect(model).to_have_value("large")
        expect(page.get_by_label("Message")).to_have_value("x")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER)


@browser_test
def test_who_is_faster_than_the_list_of_models_loses_nothing(page: Page) -> None:
    held: list[Route] = []
    with served(ScriptedRouter()) as url:
        page.route("**/v1/models", lambda route: held.append(route))
        page.goto(url)
        expect(page.get_by_label("Message")).to_be_focused()
        ask(page, "x")
        page.get_by_label("System prompt").focus()
        await_that(page, lambda: len(held) == 2)  # the page's own, and the message's
        held[1].continue_()
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
        page.get_by_label("Model").select_option("org/tiny")
        page.get_by_label("System prompt").focus()
        with page.expect_response("**/v1/models"):
            held[0].continue_()
        page.wait_for_timeout(100)
        expect(page.get_by_label("Model")).to_have_value("org/tiny")
        expect(page.get_by_label("System prompt")).to_be_focused()


@browser_test
def test_errors(page: Page) -> None:
    router = ScriptedRouter()
    with served(router) as url:
        page.goto(url)
        alert = page.get_by_role("alert")
        page.get_by_label("Top k").fill("0")
        ask(page, "x")  # the browser itself says what is wrong
        assert router.requests == []
        page.get_by_label("Top k").fill("")
        page.get_by_label("Most tokens").fill("4000")
        page.get_by_role("button", name="Send").click()
        expect(alert).to_contain_text("The context is 256 tokens")
        expect(page.get_by_label("Message")).to_have_value("x")  # nothing is lost
        assert answers(page) == []
        expect_status(page, 400)
        axe(page, "dark")
        page.get_by_label("Most tokens").fill("")
        router.fail_after = 7
        page.get_by_role("button", name="Send").click()
        expect(alert).to_contain_text("the replicas are gone")
        expect(page.locator("article .facts")).to_contain_text("broken off")
        assert answers(page) == [ANSWER[:7]]
        router.fail_after = None
    ask(page, "Anybody there?")
    expect(alert).to_contain_text("can't be reached")
    await_that(page, lambda: len(page.complaints) >= 1)  # type: ignore[attr-defined]
    assert len(page.complaints) == 1 and "ERR_CONNECTION_REFUSED" in page.complaints.pop()  # type: ignore[attr-defined]


@browser_test
@pytest.mark.parametrize("path", PATHS)
def test_key(page: Page, path: str) -> None:
    with served(ScriptedRouter(api_key="ключ")) as url:
        page.goto(url + path)
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        expect_status(page, 401, 401)  # the page, then the first thing it asks for
        axe(page)
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("Wrong API key")
        expect_status(page, 403)
        key.fill("ключ")
        page.get_by_role("button", name="Use key").click()
        expect(page.get_by_role("alert")).to_have_text("")
        expect(key).to_be_hidden()
        page.reload()
        expect_status(page, 401)  # an address has no key; what the page fetches has it
        expect(key).to_be_hidden()
        with page.expect_navigation():
            page.get_by_role("link", name="Chat").click()
        expect_status(page, 401)
        ask(page, "x")
        expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
        page.get_by_role("button", name="Forget key").click()
        expect(key).to_be_visible()


@browser_test
def test_probabilities_and_origins(page: Page, service: Service) -> None:
    page.goto(service.url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("60")
    page.get_by_label("by origin").check()
    ask(page, "abcabcabc")
    expect(page.locator("article .facts")).to_contain_text("60 tokens")
    shown = page.locator("article.assistant .token")
    assert shown.count() == 60
    drafts = page.locator("article.assistant .draft").count()
    assert drafts > 5 and page.locator("article.assistant .target").count() == 60 - drafts
    drafted, own = (
        page.locator(f"article.assistant .{name}").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for name in ("draft", "target")
    )
    assert drafted != own
    axe(page, "dark")
    page.get_by_label("by probability").check()
    expect(page.get_by_role("list", name="Origin")).to_be_hidden()
    expect(page.get_by_role("list", name="Probability")).to_be_visible()
    page.get_by_text("Tokens in a table").click()
    rows = page.locator("article.assistant tbody tr")
    expect(rows).to_have_count(60)
    probabilities = [float(text.split()[0]) / 100 for text in rows.locator("td:nth-child(2)").all_inner_texts()]
    levels = [sum(p >= bound for bound in (0.05, 0.2, 0.5, 0.9)) for p in probabilities]
    classes = [(shown.nth(i).get_attribute("class") or "").split()[1] for i in range(0, 60, 20)]
    assert classes == [f"p{level}" for level in levels[::20]]
    axe(page, "light")


@browser_test
def test_live_state(page: Page, context: BrowserContext, service: Service) -> None:
    page.goto(service.url + "/live")
    expect(page.get_by_role("row")).to_have_count(2)
    row = page.get_by_role("row").nth(1)
    expect(row).to_contain_text(re.compile(r"^one\d+\.\d s0"))  # its name, the age of its last step, and none running
    stats = service.engine.stats()
    assert stats.running == 0
    facts = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True))
    assert (facts["Replicas"], facts["Running"], facts["Queue"], facts["KV pages held"]) == ("1", "0", "0", "0 %")
    before = page.locator("#read").inner_text()
    expect(page.locator("#read")).not_to_have_text(before)  # it goes on by itself
    axe(page)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("link", name="Chat").click()
    expect(page).to_have_url(service.url + "/")
