"""The chat page in a real browser, over an endpoint whose answers the tests write."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.dashboard.pictures import portray
from tests.support.dashboard.site import looking
from tests.support.processes.scripted_endpoint import MODEL, PEERS, ScriptedEndpoint, said, scripted

pytestmark = pytest.mark.slow

KEY = "a-key-for-tests"
HOSTILE = (
    "<script>document.title = 'owned'</script> <img src=x onerror=alert(1)> \x1b[31mred\x1b[0m "
    "[click](javascript:alert(1)) [web](https://example.org/)\n```\n</code><b>bold</b>\n```\n\u202eright to left"
)
MARKDOWN = """It is *short*, **and** `code`:

```python
print("hello")
```

1. one
   - nested
2. two

| a | b |
|---|--:|
| 1 | 2 |

> quoted"""
CALL = [
    {
        "tool_calls": [
            {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Bern"}'}}]},
]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ScriptedEndpoint]:
    with scripted(ScriptedEndpoint([said("Hello there.")])) as serving:
        yield serving


@pytest.fixture
def page(browser: Browser, endpoint: ScriptedEndpoint) -> Iterator[Page]:
    endpoint.asked.clear()
    with looking(browser) as page:
        page.goto(endpoint.url)
        yield page


def ask(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Page) -> Any:
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    return page.get_by_role("article", name="Answer").last


def test_axe_finds_nothing_on_the_chat_page(
    browser: Browser, endpoint: ScriptedEndpoint, pictures: Path
) -> None:
    thoughts = [{"reasoning_content": "The user wants Python."}]
    endpoint.answers = [[*thoughts, *said(MARKDOWN)], CALL]
    with looking(browser, reduced_motion="reduce") as page:
        page.goto(endpoint.url)
        portray(page, pictures, "chat-empty")
        ask(page, "Write a program.")
        answered(page).get_by_role("button", name="show where the time went").click()
        ask(page, "How is the weather?")
        answered(page).get_by_text("Calls").click()
        portray(page, pictures, "chat")
        page.get_by_role("button", name="Settings").click()
        portray(page, pictures, "chat-settings")


def test_hostile_output_shows_as_text(page: Page, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers = [[{"reasoning_content": HOSTILE}, {"content": HOSTILE}, *CALL]]
    ask(page, HOSTILE)
    answer = answered(page)
    for hostile in (
        "<script>",
        "<img src=x onerror=alert(1)>",
        "\u241b[31mred",
        "(javascript:alert(1))",
        "\ufffdright",
    ):
        expect(answer.locator(".markdown")).to_contain_text(hostile)
        expect(page.get_by_role("article", name="You")).to_contain_text(hostile)
    expect(answer.locator("pre code").first).to_have_text("</code><b>bold</b>")
    (link,) = answer.locator("a").all()
    assert (link.get_attribute("href"), link.get_attribute("rel")) == (
        "https://example.org/",
        "noopener noreferrer",
    )
    expect(page.locator("main :is(img, script), main :is(.markdown, .said, .fold) b")).to_have_count(0)
    assert page.title() != "owned"
    answer.get_by_role("button", name="show where the time went").press("Enter")
    page.get_by_role("slider", name="Trips of the answer").press("Home")
    for hostile in ("<script>", "\u241b[31mred", "\ufffdright"):
        expect(page.locator(".trip-title")).to_contain_text(hostile)


def test_a_chat_is_kept_edited_and_continued_by_keyboard(page: Page, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers = [said("The first answer."), said("The second answer."), said("The third answer.")]
    page.get_by_role("button", name="Settings").press("Enter")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Save").press("Enter")
    ask(page, "One?")
    expect(answered(page)).to_contain_text("The first answer.")
    expect(answered(page)).to_contain_text("1 token a trip")
    body = endpoint.asked[-1]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
    ]
    assert body["temperature"] == 0.5
    assert "top_k" not in body
    answered(page).get_by_role("button", name="Regenerate").press("Enter")
    expect(answered(page)).to_contain_text("The second answer.")
    page.get_by_role("textbox", name="Message").press("ArrowUp")
    page.get_by_role("textbox", name="Edit the message").fill("Two?")
    page.keyboard.press("Enter")
    expect(answered(page)).to_contain_text("The third answer.")
    assert [each["content"] for each in endpoint.asked[-1]["messages"]] == ["Be brief.", "Two?"]
    page.reload()
    page.get_by_role("button", name="Two?", exact=True).press("Enter")
    expect(page.get_by_role("article")).to_have_count(2)
    expect(answered(page)).to_contain_text("The third answer.")
    page.get_by_role("button", name="Delete Two?").press("Enter")
    page.reload()
    expect(page.get_by_role("button", name="Two?", exact=True)).to_have_count(0)


def test_a_click_shows_the_slowest_trip_of_each_host(page: Page, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers = [said("one two three four five six seven eight nine ten eleven twelve thirteen")]
    ask(page, "Count.")
    answered(page).get_by_role("button", name="3 hosts, blocks 0:10, 10:20, 20:30").press("Enter")
    trips = page.get_by_role("slider", name="Trips of the answer")
    expect(trips).to_have_attribute("aria-valuenow", "4")
    expect(page.locator(".trip-title")).to_contain_text("“ten eleven twelve ”, 1 token in")
    expect(page.get_by_role("row", name="0:10")).to_contain_text("50\u202fms")
    trips.press("ArrowLeft")
    expect(page.get_by_role("row", name="0:10")).to_contain_text("2.0\u202fms")


def test_escape_stops_an_answer_and_what_came_stays(page: Page, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers, endpoint.pause = [said("one two three " * 3000)], lambda: asyncio.sleep(0.001)
    ask(page, "Go on.")
    expect(page.get_by_role("article", name="Answer")).to_contain_text("one two three one")
    page.keyboard.press("Escape")
    endpoint.pause = lambda: asyncio.sleep(0)
    expect(answered(page)).to_contain_text("stopped")
    expect(answered(page)).to_contain_text("one two three one")


def test_a_chat_deleted_during_its_answer_stays_deleted(page: Page, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers = [said("Hello there."), said("one two three " * 3000)]
    ask(page, "Hello?")
    answered(page)
    endpoint.pause = lambda: asyncio.sleep(0.001)
    ask(page, "Go on.")
    expect(page.get_by_role("article", name="Answer").last).to_contain_text("one two three one")
    page.get_by_role("button", name="Delete Hello?").press("Enter")
    endpoint.pause = lambda: asyncio.sleep(0)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    stored = "Object.keys(localStorage).filter(key => key.startsWith('swarmnet.chat.')).length"
    assert page.evaluate(stored) == 0
    expect(page.get_by_role("button", name="Delete Hello?")).to_have_count(0)


def test_the_list_of_models_has_forming_ones_and_adapters(page: Page, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers = [said("Hello there.")]
    models = page.get_by_role("combobox", name="Model")
    expect(models).to_have_value(MODEL)
    forming = models.locator("option[value=large]")
    expect(forming).to_have_text("large (forming: nobody hosts blocks 20:30 of 30, 0.07 GB)")
    expect(forming).to_be_disabled()
    expect(models.locator(f"optgroup[label='Adapters of {MODEL}'] option")).to_have_text(f"{MODEL}:law")
    models.select_option(f"{MODEL}:law")
    ask(page, "Hello?")
    expect(answered(page)).to_contain_text("Hello there.")
    assert endpoint.asked[-1]["model"] == f"{MODEL}:law"
    endpoint.missing.clear()
    models.focus()
    expect(forming).to_have_text("large")
    expect(forming).to_be_enabled()
    expect(models).to_have_value(f"{MODEL}:law")


def test_the_reader_types_the_result_of_a_tool(page: Page, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers = [CALL, said("It rains.")]
    ask(page, "How is the weather?")
    answered(page).get_by_text("Calls").click()
    expect(page.get_by_text('{"city": "Bern"}')).to_be_visible()
    page.get_by_role("textbox", name="Result of the call").fill("rain")
    page.get_by_role("button", name="Send the result").press("Enter")
    expect(answered(page)).to_contain_text("It rains.")
    assert endpoint.asked[-1]["messages"][-1] == {"role": "tool", "content": "rain", "tool_call_id": "c1"}


def test_the_page_of_a_demo_kills_a_host_of_the_answer(page: Page, endpoint: ScriptedEndpoint) -> None:
    expect(page.get_by_role("button", name="Kill a host")).to_be_hidden()
    page.goto(f"{endpoint.url}/#demo")
    page.reload()
    endpoint.answers, endpoint.pause = [said("one two three " * 300)], lambda: asyncio.sleep(0.01)
    ask(page, "Go on.")
    expect(page.get_by_text("10:20")).to_be_visible()
    page.get_by_role("button", name="Kill a host").press("Enter")
    expect(page.get_by_text("This host was killed. Another one takes its place.")).to_be_visible()
    assert endpoint.killed == [PEERS[1]]
    page.get_by_role("button", name="Stop").press("Enter")
    endpoint.pause = lambda: asyncio.sleep(0)
    answered(page)


def test_a_key_sees_its_use_and_cancels_a_request(page: Page, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers, endpoint.running = [said("Hello there.")], ["req_1"]
    ask(page, "Hello?")
    expect(answered(page)).to_contain_text("Hello there.")
    expect(
        page.get_by_text("1 request · 1\u202f234 tokens read, 7 of them cached · 56 written")
    ).to_be_visible()
    page.get_by_role("button", name="Cancel the request to large").press("Enter")
    expect(page.get_by_text("large: 9 tokens")).to_have_count(0)
    assert endpoint.running == []


def test_a_page_behind_a_key_asks_for_it(browser: Browser) -> None:
    with (
        scripted(ScriptedEndpoint([said("Hello there.")]), KEY) as endpoint,
        browser.new_context() as context,
    ):
        page = context.new_page()  # not ``looking``: the browser logs a refused request as an error
        page.goto(endpoint.url)
        for key in ("another-key", KEY):
            page.get_by_label("API key of this endpoint").fill(key)
            page.keyboard.press("Enter")
        ask(page, "Hello?")
        expect(answered(page)).to_contain_text("Hello there.")
        page.reload()
        expect(page.get_by_role("combobox", name="Model")).to_have_value(MODEL)
        assert (
            page.evaluate("localStorage.length + ' ' + JSON.stringify(localStorage).includes('a-key')")
            == "2 false"
        )
