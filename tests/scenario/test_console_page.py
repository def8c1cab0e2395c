"""The console in a real Chromium, on a real broker with load: what it shows is what the JSON of that moment says.

Invariant   A number on a screen is the number in the document whose `as_of` the screen names. A page that gets no answer
            says since when, and is right again without a reload.
"""

import itertools
import json
import math
import os
import re
import signal
import socket
from contextlib import contextmanager, suppress

import pytest
from brokers import Broker
from browsers import Watched, chromium, http_base
from consuls import free_ports
from waiting import meanwhile

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

PAGES = ["#/overview", "#/topics", "#/topics/orders", "#/groups", "#/groups/billing", "#/letters", "#/health"]
# Text and what it stands on, as the browser has computed them, of every element that has text of its own.
_CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(at).backgroundColor);
      if (a > 0.99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const has = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return [...document.body.querySelectorAll("*")].filter((element) => has(element) && element.checkVisibility())
    .map((element) => [element.outerHTML.slice(0, 80), parse(getComputedStyle(element).color).slice(0, 3), ground(element)]);
}"""
# What a screen reader needs: names, one h1, headings in steps, no id twice, no colour by a style in the markup.
_UNSOUND = """() => {
  const bad = [];
  const seen = (element) => element.checkVisibility();
  const name = (element) => (element.getAttribute("aria-label") || element.textContent || "").trim()
    || (element.labels && [...element.labels].map((label) => label.textContent).join(" ").trim());
  for (const element of document.querySelectorAll("a, button, input, select, [role]")) {
    if (seen(element) && !name(element) && !["status", "presentation"].includes(element.getAttribute("role"))) {
      bad.push("no name: " + element.outerHTML.slice(0, 120));
    }
  }
  for (const element of document.querySelectorAll("input, select")) {
    if (seen(element) && !element.labels.length) bad.push("no label: " + element.outerHTML.slice(0, 120));
  }
  if (document.querySelectorAll("h1").length !== 1) bad.push("not one h1");
  let level = 0;
  for (const heading of document.querySelectorAll("main :is(h1, h2, h3, h4)")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) bad.push(`h${level} is followed by ${heading.tagName}: ${heading.textContent}`);
    level = next;
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) bad.push("an id twice: " + ids);
  if (document.querySelector("[style], [onclick], script:not([src])")) bad.push("inline style or script");
  for (const cell of document.querySelectorAll("th")) if (!cell.scope) bad.push("a th without scope");
  for (const table of document.querySelectorAll("table")) if (!table.caption) bad.push("a table without a caption");
  if (!document.documentElement.lang) bad.push("no language");
  return bad;
}"""

_SHOWN = """(scope) => {
  const fields = [...document.querySelectorAll(scope + " [data-field]")].map(({ dataset }) => [dataset.field, dataset.value]);
  return [document.getElementById("main").dataset.asOf, Object.fromEntries(fields)];
}"""


@contextmanager
def stopped(pid):
    """A process that hangs meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def browser():
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def broker(browser, tmp_path_factory):
    """A broker with load: five keys of two topics, and a group that is behind. Most of topic `old` goes to the tier."""
    root = tmp_path_factory.mktemp("console")
    made = Broker(root / "broker")
    made.env |= {"KMQ_TIER": f"file://{root}/store", "KMQ_TIER_EVERY": "2s"}
    made.env["KMQ_HTTP_PORT"] = str(free_ports(1)[0])  # the same after a restart, as for a user
    made.env["KMQ_INTAKES"] = "0=lines"
    made.up()
    try:
        limits = [f"--set={limit}" for limit in ("tier=on", "segment_bytes=64KiB", "local_retention_bytes=1MiB")]
        assert made.kmq("topics", "create", "old", *limits).returncode == 0
        assert made.kmq("produce", "old", text=f"{'x' * 200}\n" * 12_000).returncode == 0
        with load(made):
            made.wait(lambda: made.get("/api/admin/topics/orders")[0] == 200, "a topic")
            query = "group=billing&member=b1&maxMessages=5&autoCommit=true&timeoutMs=20000"
            for _ in range(2):  # the second call commits what the first has brought
                assert made.get(f"/api/topics/orders/consume?{query}")[0] == 200
            yield made
    finally:
        made.close()


def load(broker):
    """Send 400 messages a second to each of two topics meanwhile."""
    lines = [b'%s.u%d|0||{"n": %d}' % (topic, n % 5, n) for topic in (b"orders", b"clicks") for n in range(20)]

    def produce():
        with suppress(OSError):
            broker.send_lines(lines)

    return meanwhile(produce, every_s=0.05)


@pytest.fixture
def tab(browser, broker):
    """A tab on the console; at its end the page has complained of nothing."""
    made = Watched(browser, http_base(broker.pipes))
    yield made
    made.close()


def loaded(tab, hash="#/overview"):
    page = tab.open(hash)
    tab.wait("() => !document.querySelector('#main .now')?.textContent.includes('Loading')")
    return page


def shown(page, scope):
    """Field → value of what the page shows inside an element, with the moment of the screen, read in one go."""
    return page.evaluate(_SHOWN, scope)


def as_shown(value):
    """A number as JavaScript writes it."""
    return "" if value is None else str(int(value)) if float(value).is_integer() else repr(float(value))


def test_the_overview_shows_the_numbers_of_the_document_it_names(tab):
    page = loaded(tab)
    tab.wait("() => Number(document.querySelector('[data-stage=router] [data-field=rate]')?.dataset.value) > 0")
    for stage in ("framer", "durability", "router"):
        as_of, found = shown(page, f"[data-stage={stage}]")
        document = tab.document("/api/overview", as_of)
        [status] = [each for each in document["status"]["stages"] if each["name"] == stage]
        rate = document["rates"].get(stage)
        expected = {"state": status["state"], "seq": str(status["seq"]), "rate": as_shown(rate and rate["messages"])}
        assert {name: found[name] for name in expected} == expected
    page.wait_for_selector("[data-stage=tier] [data-field=copied]:not([data-value='0'])")
    as_of, found = shown(page, "[data-stage=tier]")
    copy = tab.document("/api/overview", as_of)["status"]["copy"]
    assert (found["copied"], found.get("behind", "0")) == (str(copy["seq"]), str(copy["behind"]))
    for link in ("raw", "received", "framed", "durable"):
        as_of, found = shown(page, f"[data-link={link}]")
        [expected] = [each for each in tab.document("/api/overview", as_of)["status"]["links"] if each["name"] == link]
        assert math.isclose(float(found["fill"]), expected["fill"])
    page.wait_for_selector("[data-topic=orders]")
    as_of, found = shown(page, "[data-topic=orders]")
    [expected] = [each for each in tab.document("/api/overview", as_of)["topics"] if each["topic"] == "orders"]
    assert found["records"] == str(expected["records"]) and found["bytes"] == str(expected["bytes"])


def test_an_intake_shows_what_came_to_it(tab, broker):
    port = int((broker.pipes / "intake1.port").read_text())
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"one\ntwo\n")
    page = loaded(tab)
    page.wait_for_selector(f"[data-intake='0']:has-text('{port}/tcp → lines') [data-field=rate]:not([data-value=''])")
    as_of, found = shown(page, "[data-intake='0']")
    [expected] = tab.document("/api/overview", as_of)["intakes"]
    assert found == {name: as_shown(expected[name]) for name in ("rate", "bytes_rate", "refused", "dropped")}


def test_the_port_for_clients_of_kafka_shows_its_connections(tab, broker):
    page = loaded(tab)
    port = int((broker.pipes / "kafka.port").read_text())
    with socket.create_connection(("127.0.0.1", port)):
        page.wait_for_selector(f"[data-kafka='{port}'] [data-field=connections][data-value='1']")
        as_of, found = shown(page, "[data-kafka]")
        expected = tab.document("/api/overview", as_of)["status"]["kafka"]
    assert found == {name: as_shown(expected[name]) for name in expected if name not in ("port", "misdirected")}


def test_seqs_move_while_nobody_touches_the_page(tab):
    page = loaded(tab)
    seq = "Number(document.querySelector('[data-stage=router] [data-field=seq]')?.dataset.value)"
    tab.wait(f"() => {seq} > 0")
    before = page.evaluate(seq)
    assert tab.wait(f"(before) => {seq} > before && {seq}", before) > before


def test_topics_and_groups_show_what_their_documents_say(tab):
    page = loaded(tab, "#/topics")
    page.wait_for_selector("[data-topic=orders] [data-field=rate]")
    as_of, found = shown(page, "[data-topic=orders]")
    [expected] = [each for each in tab.document("/api/overview/topics", as_of)["topics"] if each["topic"] == "orders"]
    assert (found["records"], found["rate"]) == (str(expected["records"]), as_shown(expected["rate"]))
    page = loaded(tab, "#/groups")
    page.wait_for_selector("[data-group=billing] [data-field=lag]:not([data-value=''])")  # the group was looked at
    as_of, found = shown(page, "[data-group=billing]")
    [expected] = [each for each in tab.document("/api/overview", as_of)["groups"] if each["group"] == "billing"]
    assert "1 group." in page.inner_text(".now")
    assert (found["lag"], found["state"]) == (as_shown(expected["lag"]), expected["state"])


def test_a_killed_router_comes_back_as_a_restart_without_a_reload(tab, broker):
    page = loaded(tab)
    page.evaluate("window.same = true")
    old = broker.pids()["router"]
    broker.kill("router")
    page.wait_for_selector("[data-stage=router]:has-text('restart')")
    page.evaluate("location.hash = '#/health'")
    pid = "document.querySelector('[data-stage=router] [data-field=pid]')?.dataset.value"
    tab.wait(f"(old) => Number({pid}) > 0 && {pid} !== String(old)", old)
    as_of, found = shown(page, "[data-stage=router]")
    stages = tab.document("/api/overview", as_of)["status"]["stages"]
    [expected] = [each for each in stages if each["name"] == "router"]
    assert (found["pid"], found["restarts"]) == (str(expected["pid"]), str(expected["restarts"]))
    assert page.evaluate("window.same"), "the page was loaded again"


def test_a_gateway_that_is_gone_is_said_with_the_age_of_the_numbers(tab, broker):
    page = loaded(tab)
    page.wait_for_selector("[data-field=as_of]")
    supervisor = broker.pids()["supervisor"]
    with stopped(supervisor):  # or the gateway may be back before the page asks again
        broker.kill("gateway")
        page.wait_for_selector("#connection:not([hidden]) >> text=No answer since")
        assert "as of" in page.inner_text("#connection") and page.evaluate("document.body.className") == "stale"
    page.wait_for_selector("#connection", state="hidden", timeout=60_000)
    assert page.evaluate("document.body.className") == ""


def test_a_gateway_that_hangs_is_said_before_the_request_to_it_is_given_up(tab, broker):
    page = loaded(tab)
    page.wait_for_selector("[data-field=as_of]")
    gateway = broker.pids()["gateway"]
    with stopped(gateway):
        waited = page.evaluate(
            """() => new Promise((done) => {
              const begin = performance.now();
              new MutationObserver(() => done(performance.now() - begin)).observe(document.body, { attributeFilter: ["class"] });
            })"""
        )
        assert page.evaluate("document.body.className") == "stale" and waited < 10_000
        assert "as of" in page.inner_text("#connection")
    page.wait_for_selector("#connection", state="hidden", timeout=60_000)
    assert page.evaluate("document.body.className") == ""


_AGES = """() => [...document.querySelectorAll("main .stale")].map((element) => {
  const { color, backgroundColor, content } = getComputedStyle(element, "::before");
  const parse = (text) => text.match(/[\\d.]+/g).map(Number).slice(0, 3);
  return [element.title, content, parse(color), parse(backgroundColor)];
})"""


@pytest.mark.parametrize("look", ["light", "dark"])
def test_numbers_that_are_older_than_three_seconds_are_marked_with_their_age(browser, broker, look):
    tab = Watched(browser, http_base(broker.pipes), color_scheme=look, reduced_motion="reduce")
    page = loaded(tab)
    tab.wait("() => document.querySelector('.columns [data-topic=orders]')")
    assert page.evaluate(_AGES) == []
    gateway = broker.pids()["gateway"]
    with stopped(gateway):
        tab.wait("() => document.querySelectorAll('main > .stale').length === 2")  # the charts are drawn every 10 s
        for age, drawn, front, back in page.evaluate(_AGES):
            assert int(re.fullmatch(r"as of (\d+) s ago", age)[1]) >= 3 and drawn == f'"{age}"'
            assert contrast(front, back) >= 4.5
        low = [row for row in page.evaluate(_CONTRASTS) if contrast(*row[1:]) < 4.5]
        assert not low
        assert page.evaluate("getComputedStyle(document.querySelector('[data-field=seq]')).fontStyle") == "italic"
    tab.wait("() => !document.querySelector('.stale')")
    tab.close()


def test_numbers_of_a_process_that_hangs_are_marked_and_its_finding_leads_to_the_runbook(tab, broker):
    page = loaded(tab)
    page.wait_for_selector("[data-stage=framer]")
    framer = broker.pids()["framer"]
    with stopped(framer):
        page.wait_for_selector("[data-stage=framer].stale[title^='as of ']")
        assert page.locator(".stale").count() == 1, "the others go on"
        page.evaluate("location.hash = '#/health'")
        page.wait_for_selector("tr[data-stage=framer].stale")
        page.locator(".finding[data-code=silent]").get_by_role("link", name="Runbook: silent").click()
        page.wait_for_selector("h3#silent:has-text('silent')")
    assert page.url.endswith("/console/operations.md#silent")
    page.get_by_role("link", name="A full disk").first.click()
    page.wait_for_selector("h2#a-full-disk")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("link", name="Health").click()
    page.wait_for_selector("[data-stage=framer]:not(.stale)")


def test_health_says_when_a_process_was_started(tab):
    page = loaded(tab, "#/health")
    page.wait_for_selector("[data-stage=router]")
    row = page.inner_text("[data-stage=router]")
    now = page.evaluate("new Date().toISOString().slice(0, 11).replace('T', ' ')")
    assert re.search(now[:4] + r"-\d\d-\d\d \d\d:\d\d:\d\d", row), row


def test_an_axis_says_a_number_once_and_none_where_nothing_is_known(tab):
    page = loaded(tab)
    labels = """async (values) => {
      const { chart } = await import("/console/chart.js");
      const say = (value) => String(Math.round(value));
      const made = chart({ title: "t", series: [{ name: "a", values, kind: "s0" }], from: 0, step: 5, say });
      return [...made.querySelectorAll(".y span")].map((span) => span.textContent);
    }"""
    assert page.evaluate(labels, [None, None]) == ["", "", ""]
    assert page.evaluate(labels, [0, 1]) == ["1", "", "0"]
    assert page.evaluate(labels, [0, 40]) == ["50", "25", "0"]


@pytest.mark.parametrize("look", ["light", "dark"])
def test_text_has_contrast_on_every_page(browser, broker, look):
    tab = Watched(browser, http_base(broker.pipes), color_scheme=look)
    for hash in PAGES:
        page = loaded(tab, hash)
        rows = page.evaluate(_CONTRASTS)
        assert len(rows) > 8
        low = [(name, contrast(front, back)) for name, front, back in rows if contrast(front, back) < 4.5]
        assert not low, (hash, low)
    dark = sum(page.evaluate(_CONTRASTS)[0][2]) < 200
    assert dark == (look == "dark")
    tab.close()


def contrast(front, back):
    """The ratio of WCAG: 1 to 21."""

    def luminance(colour):
        parts = [part / 255 for part in colour]
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    dark, light = sorted((luminance(front), luminance(back)))
    return (light + 0.05) / (dark + 0.05)


def test_every_page_is_sound_for_screen_readers_and_asks_this_host_alone(tab):
    for hash in PAGES:
        page = loaded(tab, hash)
        assert page.evaluate(_UNSOUND) == [], hash
        assert "KMQ" in page.title()
    assert tab.hosts == {tab.base.removeprefix("http://")}


def test_a_narrow_screen_does_not_scroll_sideways(browser, broker):
    tab = Watched(browser, http_base(broker.pipes), viewport={"width": 390, "height": 844})
    for hash in PAGES:
        page = loaded(tab, hash)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, hash
    tab.close()


def test_the_keyboard_reaches_every_page_and_the_focus_is_seen(tab):
    page = loaded(tab)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for name in ("Topics", "Groups", "Dead letters", "Health"):
        for _ in range(300):  # around the page, past every topic and event that it has by now
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == name:
                break
        else:
            pytest.fail(f"the keyboard does not reach {name}")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid", "the focus must be seen"
        page.keyboard.press("Enter")
        tab.wait("(name) => document.querySelector('h1')?.textContent === name", name)
        assert page.evaluate("document.activeElement.tagName") == "H1"
        page.focus(".brand a")


def test_focus_stays_where_it_is_while_numbers_change(tab):
    page = loaded(tab)
    page.wait_for_selector("[data-topic=orders] a")
    page.focus("[data-topic=orders] a")
    as_of = page.evaluate("document.getElementById('main').dataset.asOf")
    tab.wait("(old) => document.getElementById('main').dataset.asOf !== old", as_of)
    assert page.evaluate("document.activeElement.textContent") == "orders"


def test_focus_stays_where_it_is_while_rows_change_places(tab):
    page = tab.page
    turns = itertools.count()

    def answer(route):
        doc = route.fetch().json()
        assert len(doc["topics"]) > 1
        doc["topics"].sort(key=lambda topic: topic["topic"], reverse=next(turns) % 2 == 1)
        route.fulfill(json=doc)

    page.route("**/api/overview*", answer)
    loaded(tab)
    first = "document.querySelector('[data-topic]').dataset.topic"
    name = page.evaluate(first)
    page.focus(f"[data-topic={name}] a")
    for leads in (False, True):  # the row goes down, then up
        tab.wait(f"([name, leads]) => ({first} === name) === leads", [name, leads])
        assert page.evaluate("document.activeElement.textContent") == name
    page.unroute("**/api/overview*")


def test_a_topic_in_the_tier_shows_what_lies_there_and_what_on_the_disk(tab, broker):
    def size():
        [found] = json.loads(broker.get("/api/admin/topics/old")[1])["partitions"]
        return found

    broker.wait(lambda: size().get("localStartOffset", 0) > 200, "old messages leave the disk")
    page = loaded(tab, "#/topics/old")
    page.click("details.options summary")
    _, found = shown(page, "[data-partition='0']")
    expected = size()
    names = "startOffset", "localStartOffset", "tierEndOffset", "tierBytes"
    assert {name: found[name] for name in names} == {name: str(expected[name]) for name in names}
    page = loaded(tab)
    page.wait_for_selector("[data-stage=tier] [data-field=tier_bytes]:not([data-value='0'])")
