"""Messages in the console: whatever a producer sent is shown as text, however much of it there is.

Invariant   No key, value, header, topic or group runs a script, opens a dialog, loads anything or breaks the layout. A topic
            of any speed leaves the page quick, and the page says which share of it is shown.
"""

import json
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest
from brokers import Broker
from browsers import Watched, chromium, http_base

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)><svg onload=alert(2)>",
    '"><a href="javascript:alert(1)">x</a>{{7*7}}${7*7}',
    "\u202etxt.exe\u200b\u0007\u001b[31m\x7f\u0085",
    "a\u3164b\u034fc\ufe0fd\U000e0041e\u180ef",
    "</pre></li><iframe src=//example.org></iframe><style>*{display:none}</style>",
]
ROWS = 500


@pytest.fixture(scope="module")
def browser():
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def broker(browser, tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("console") / "broker")
    made.up()
    yield made
    made.close()


@pytest.fixture
def tab(browser, broker):
    made = Watched(browser, http_base(broker.pipes))
    yield made
    made.close()


def call(broker, path, body, method="POST"):
    url = f"{http_base(broker.pipes)}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def produce(broker, topic, *messages):
    found = call(broker, f"/api/topics/{topic}/produce?format=text", {"messages": list(messages)})
    assert all("offset" in each for each in found["results"]), found


def text(page, selector):
    """What an element that is shown says. Its inner text would be empty until Chromium has drawn that message."""
    place = page.locator(selector).first
    place.wait_for()
    return place.text_content()


def open_all(page):
    page.wait_for_selector(".message")
    for button in page.locator(".message .open").all():
        button.press("Enter")


def test_hostile_keys_values_and_headers_are_text(tab, broker):
    headers = [{"name": "h<b>", "value": text} for text in HOSTILE]
    produce(broker, "hostile", *[{"key": text, "value": text, "headers": headers} for text in HOSTILE])
    page = tab.open("#/topics/hostile")
    page.wait_for_selector(f".message:nth-of-type({len(HOSTILE)})")
    open_all(page)
    assert page.locator(".message .left").count() == len(HOSTILE)
    seen = text(page, ".messages")
    assert HOSTILE[0] in seen and HOSTILE[1] in seen and HOSTILE[5] in seen
    hidden = "<U+202E>txt.exe<U+200B><BEL><ESC>[31m<DEL><U+0085>".replace("<", "\u2039").replace(">", "\u203a")
    assert hidden in seen, "what cannot be seen is named"
    named = ("3164", "034F", "FE0F", "E0041", "180E")
    assert "a{}b{}c{}d{}e{}f".format(*(f"\u2039U+{code}\u203a" for code in named)) in seen
    assert page.locator("main :is(script, iframe, img, style, [onload], [onerror])").count() == 0
    assert page.locator("main a[href^='javascript']").count() == 0
    assert tab.hosts == {tab.base.removeprefix("http://")}


def test_a_tab_or_line_feed_is_named_in_a_row_and_seen_as_itself_in_an_open_message(tab, broker):
    produce(broker, "layout", {"key": "k\t1", "value": "a\tb\nc"})
    page = tab.open("#/topics/layout")
    row = [text(page, f".message {part}") for part in (".key-of", ".short")]
    assert [one.replace("\u2039", "<").replace("\u203a", ">") for one in row] == ["k<TAB>1", "a<TAB>b<LF>c"]
    open_all(page)
    assert text(page, ".message .value") == "a\tb\nc"
    assert text(page, ".said").startswith("1 message shown")


MARKUP = "<img src=x onerror=alert(1)><b>"


def marked(found):
    """The same document, with markup behind every text but the names of stages and links."""
    if isinstance(found, dict):
        kept = ("severity", *(("name",) if "pid" in found or "capacity" in found else ()))
        return {name: each if name in kept else marked(each) for name, each in found.items()}
    if isinstance(found, list):
        return [marked(each) for each in found]
    return found + MARKUP if isinstance(found, str) else found


def test_whatever_name_a_document_holds_is_text(tab, broker):
    """The broker refuses such names of topics and groups; the page must not rely on that."""
    produce(broker, "read", {"value": "x"})
    call(broker, "/api/topics/read/commit", {"group": "readers", "offsets": [{"partition": 0, "offset": 1}]})

    def answer(route):
        response = route.fetch()
        route.fulfill(response=response, json=marked(response.json()))

    tab.page.route("**/api/**", answer)
    for hash in (
        "#/overview",
        "#/topics",
        "#/groups",
        "#/groups/readers",
        f"#/topics/{MARKUP}",
        "#/health",
    ):
        page = tab.open(hash)
        tab.wait("(markup) => document.querySelector('main').innerText.includes(markup)", MARKUP)
        assert page.locator("main :is(img, script, iframe)").count() == 0, hash
    tab.page.unroute_all(behavior="wait")


def test_a_value_that_is_not_text_is_shown_as_base64(tab, broker):
    call(broker, "/api/topics/binary/produce?format=base64", {"value": "AAH/gA==", "key": "/w=="})
    page = tab.open("#/topics/binary")
    open_all(page)
    assert "AAH/gA==" in text(page, ".message .right") and "not UTF-8" in text(page, ".message .right")


def test_a_message_of_a_mebibyte_is_cut_and_says_so(tab, broker):
    produce(broker, "large", {"value": "<b>" + "x" * ((1 << 20) - 500)})
    page = tab.open("#/topics/large")
    open_all(page)
    assert len(text(page, ".message")) < 10_000 and "shortened" in text(page, ".message .whole")
    page.get_by_role("button", name="All of 0:0").click()
    page.wait_for_selector("dialog[open]")
    assert "kmq consume has all of it" in page.inner_text("dialog")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.evaluate("document.activeElement.textContent") == "All of it", "the focus goes back to its button"


def test_messages_are_found_by_offset_seq_key_and_time_and_show_the_line(tab, broker):
    produce(broker, "found", *[{"key": f"k{n % 3}", "value": json.dumps({"n": n})} for n in range(120)])
    page = tab.open("#/topics/found")
    page.wait_for_selector(".message")
    places = "[...document.querySelectorAll('.message')].map((one) => Number(one.dataset.offset))"
    assert page.evaluate(places) == [*range(119, 69, -1)], "the newest first"
    for count in (100, 120):
        page.get_by_role("button", name="Older").press("Enter")
        tab.wait(f"() => {places}.length === {count}")
    assert page.evaluate(places) == [*range(119, -1, -1)]
    assert page.evaluate("document.activeElement.className") == "said", "its button is gone"
    ask(page, start="earliest")
    tab.wait("() => document.querySelector('.message')?.dataset.offset === '0'")
    page.get_by_role("button", name="Read on").click()
    tab.wait("() => document.querySelectorAll('.message').length === 100")
    ask(page, start="offset", value="70")
    tab.wait("() => document.querySelector('.message')?.dataset.offset === '70'")
    line = broker.lines("found")[70].decode()
    page.locator(".message .open").first.press("Enter")
    assert text(page, ".message .raw") == line
    assert text(page, ".message .value") == '{\n  "n": 70\n}'
    ask(page, start="seq", value=line.split("|")[0])
    tab.wait("(seq) => document.querySelector('.message')?.dataset.seq === seq", line.split("|")[0])
    ask(page, start="earliest", key="k1")
    tab.wait("() => document.querySelector('.message')?.dataset.offset === '1'")
    assert page.locator(".message").count() == 40
    ask(page, start="time", time="2020-01-31T12:00:00", key="")
    tab.wait("() => document.querySelector('.message')?.dataset.offset === '0'")
    ask(page, start="offset", value="9999")
    page.wait_for_selector(".said:has-text('Not read')")


def test_a_search_finds_values_and_headers_and_says_how_far_it_looked(tab, broker):
    headers = [{"name": "trace", "value": "a1"}]
    some = [{"value": f"bill {n}", "headers": headers if n % 10 == 0 else []} for n in range(60)]
    produce(broker, "searched", *some)
    page = tab.open("#/topics/searched")
    page.wait_for_selector(".message")
    ask(page, start="latest", contains="bill 1")
    page.wait_for_selector(".said:has-text('11 messages found. Looked at 60 of 60.')")
    assert text(page, ".message .short") == "bill 19" and page.get_by_role("button", name="Search on").count() == 0
    ask(page, start="earliest", contains="bill 5", header="trace=a1")
    page.wait_for_selector(".said:has-text('1 message found')")
    assert text(page, ".message .short") == "bill 50"
    ask(page, start="latest", contains="", header="trace=b")
    page.wait_for_selector(".said:has-text('0 messages found. Looked at 60 of 60.')")


def test_a_row_gives_the_command_that_reads_its_message(tab, broker):
    value = "it's 5 o'clock \u202e $HOME"
    produce(broker, "commanded", {"value": value})
    page = tab.open("#/topics/commanded")
    open_all(page)
    found = subprocess.run(["sh", "-c", text(page, ".message .command")], capture_output=True, check=True, timeout=60)
    assert [each["value"] for each in json.loads(found.stdout)["messages"]] == [value]
    page.locator(".message .open").press("Enter")
    assert page.locator(".message .whole").count() == 0


def ask(page, start, **fields):
    page.select_option("[name=start]", start)
    for name, text in fields.items():
        page.fill(f"section form [name={name}]", text)
    page.get_by_role("button", name="Show", exact=True).click()


_FOLLOWED = """() => {
  const { seen, shown, share } = document.querySelector("[data-seen]").dataset;
  return [Number(seen), Number(shown), Number(share), document.querySelector(".said").textContent];
}"""


@contextmanager
def torrent(broker, topic, rate):
    """Send about so many messages a second meanwhile."""
    ended = threading.Event()
    lines = [b"%s|0||%d %s" % (topic, n, b"x" * 80) for n in range(rate // 20)]

    def send():
        begun, sent = time.monotonic(), 0
        while not ended.is_set():
            broker.send_lines(lines)
            sent += 1
            ended.wait(max(0.0, begun + sent / 20 - time.monotonic()))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_topic_of_20_000_messages_a_second_is_followed_without_a_freeze(tab, broker):
    produce(broker, "fast", {"value": "first"})
    page = tab.open("#/topics/fast")
    page.wait_for_selector(".message")
    page.evaluate("window.longest = 0")
    with torrent(broker, b"fast", 20_000):
        page.get_by_role("button", name="Follow live").click()
        tab.wait("() => Number(document.querySelector('[data-seen]')?.dataset.seen) > 60000")
        seen, taken, share, said = page.evaluate(_FOLLOWED)
        assert 0 < taken < seen and 0 < share < 1
        assert f" of {seen:,} messages shown" in said
        assert page.locator(".message").count() <= ROWS
        assert page.evaluate("window.longest") < 5000, (
            "ms of the longest task; a busy machine takes two seconds of them"
        )
        page.get_by_role("button", name="Stop").click()
    page.wait_for_selector(".said:has-text('Stopped')")
    page.evaluate("location.hash = '#/overview'")
    page.wait_for_selector("h1:has-text('Overview')")


def test_dead_letters_are_grouped_by_reason_with_their_payload(tab, broker):
    reasons = ["no such account", "<b>timeout</b>", "no such account"]
    produce(broker, "bills", *[{"value": f"bill {n}"} for n in range(3)])
    call(broker, "/api/admin/topics/bills", {"maxDeliveries": 1}, "PATCH")
    broker.get("/api/topics/bills/consume?group=ledger&member=m&timeoutMs=20000")
    for offset, reason in enumerate(reasons):
        call(broker, "/api/topics/bills/nack", {"group": "ledger", "partition": 0, "offset": offset, "reason": reason})
    page = tab.open("#/letters")
    page.get_by_role("link", name="bills.dlq").click()
    page.wait_for_selector(".reason")
    counts = page.evaluate(
        "[...document.querySelectorAll('.reason')].map((one) => [one.dataset.reason, one.querySelector('b').dataset.value])"
    )
    document = tab.document(
        "/api/topics/bills.dlq/letters", page.evaluate("document.getElementById('main').dataset.asOf")
    )
    assert counts == [[group["reason"], str(group["count"])] for group in document["groups"]] and len(counts) == 2
    page.locator(".reason summary").first.click()
    page.locator(".reason .open").first.press("Enter")
    as_of = page.evaluate("document.getElementById('main').dataset.asOf")
    tab.wait("(old) => document.getElementById('main').dataset.asOf !== old", as_of)
    assert page.locator(".reason .whole").count() == 1, "what is open stays open"
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    assert "bill 0" in text(page, ".reason .messages") and page.locator(".reason b:has-text('timeout')").count() == 0


# --- topics ---

_TABLE = """() => {
  const text = (selector) => [...document.querySelectorAll(selector)].map((element) => element.textContent);
  return { names: text("tbody th"), sorted: text("[aria-sort] button"), order: document.querySelector("[aria-sort]")?.ariaSort,
           place: text(".pages [role=status]").join(), focus: document.activeElement.textContent };
}"""


def test_topics_are_sorted_by_any_column_and_turned_by_keyboard(tab, broker):
    broker.send_lines([b"many%03d|0||x" % n for n in range(120)] + [b"many007|0||x"] * 3)
    query = "/api/overview/topics?contains=many&sort=records&limit=1"

    def is_there():
        found = json.loads(broker.get(query)[1])
        return found["found"] == 120 and found["topics"][0]["records"] == 4

    broker.wait(is_there, "120 topics, of which one has 4 records")
    page = tab.open("#/topics")
    page.fill("#filter", "many")
    page.get_by_role("button", name="Topic", exact=True).press("Enter")
    tab.wait(f"() => ({_TABLE})().names[0] === 'many000'")
    page.get_by_role("button", name="Next").press("Enter")
    tab.wait(f"() => ({_TABLE})().names[0] === 'many100'")
    found = page.evaluate(_TABLE)
    assert found["names"] == [f"many{n}" for n in range(100, 120)] and found["place"] == "101 to 120 of 120"
    assert (found["sorted"], found["order"], found["focus"]) == (["Topic"], "ascending", "Next")
    page.get_by_role("button", name="Records").press("Enter")
    tab.wait(f"() => ({_TABLE})().names[0] === 'many007'")
    as_of = page.evaluate("document.getElementById('main').dataset.asOf")
    tab.wait("(old) => document.getElementById('main').dataset.asOf !== old", as_of)
    found = page.evaluate(_TABLE)
    assert len(found["names"]) == 100 and found["place"] == "1 to 100 of 120"
    assert (found["order"], found["focus"]) == ("descending", "Records"), "the focus stays over a refresh"
