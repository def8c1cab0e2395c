"""The console of a broker with tokens: one is typed once, and what changes anything is shown before it is done.

Invariant   Without a token nothing is shown. A token is kept in sessionStorage alone. Nothing changes before a dry run was
            shown and confirmed.
"""

import json
import os
import subprocess
import urllib.request

import pytest
from brokers import Broker
from browsers import Watched, chromium, http_base

from kmq.access import tokens

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part


@pytest.fixture(scope="module")
def browser():
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def broker(browser, tmp_path_factory):
    root = tmp_path_factory.mktemp("console")
    path = str(root / "tokens")
    made = Broker(root / "broker")
    made.env["KMQ_TOKENS"] = path
    made.all_roles = tokens.new(path, "chief")
    made.reader = tokens.new(path, "viewer", ["consume"])
    made.producer = tokens.new(path, "sender", ["produce"])
    made.up()
    call(made, "/api/topics/bills/produce?format=text", {"messages": [{"value": f"bill {n}"} for n in range(5)]})
    call(made, "/api/topics/bills/commit", {"group": "ledger", "offsets": [{"partition": 0, "offset": 4}]})
    yield made
    made.close()


def call(broker, path, body=None):
    headers = {"authorization": f"Bearer {broker.all_roles}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{http_base(broker.pipes)}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.fixture
def tab(browser, broker):
    made = Watched(browser, http_base(broker.pipes))
    yield made
    made.close()


def enter(tab, token, hash):
    """Open a page and type the token when the console asks for it; return it once it is drawn for that token."""
    page = tab.open(hash)
    page.wait_for_selector("dialog[open]")
    page.fill("dialog input", token)
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog", state="detached")
    tab.wait("() => document.body.dataset.role")  # the page is drawn anew then, with forms that are closed
    return page


def committed(broker):
    return call(broker, "/api/groups/ledger")["partitions"][0]["committed"]


def test_a_token_is_typed_once_and_kept_in_the_tab_alone(tab, broker):
    page = enter(tab, broker.reader, "#/overview")
    page.wait_for_selector("[data-stage=router]")
    tab.wait("() => document.getElementById('who').textContent.includes('viewer')")
    page.reload()
    page.wait_for_selector("[data-stage=router]")
    kept = page.evaluate("[localStorage.length, document.cookie, Object.values(sessionStorage), location.href]")
    assert kept[:3] == [0, "", [broker.reader]] and broker.reader not in kept[3]


def test_a_token_that_is_not_known_is_asked_for_once_and_no_oftener(tab, broker):
    page = tab.open("#/overview")
    page.wait_for_selector("dialog[open] >> text=The gateway wants a token.")
    page.fill("dialog input", f"{broker.reader}x")
    page.keyboard.press("Enter")
    page.wait_for_selector(
        "dialog[open] >> text=does not know this token, or it was revoked. Make one with kmq token new"
    )
    page.keyboard.press("Escape")
    page.wait_for_selector("#connection >> text=Refused: this token is not known here")
    for document in ("overview", "history"):
        with page.expect_response(f"**/api/{document}*", timeout=60_000):
            pass
    page.evaluate("new Promise((done) => setTimeout(done, 200))")  # an absence has no condition
    assert page.locator("dialog").count() == 0
    page.get_by_role("button", name="Token…").click()
    page.fill("dialog input", broker.reader)
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-stage=router]")
    assert page.locator("#connection").is_hidden()


def test_a_page_that_was_refused_goes_on_by_itself(tab, broker):
    """As where another broker of the shard, which knows the token, leads again."""
    page, refused, held = enter(tab, broker.reader, "#/topics"), iter(range(1)), []

    def answer(route):
        if next(refused, None) is None:
            route.continue_()
        else:
            body = json.dumps({"code": "forbidden", "message": "the token of viewer has produce"})
            route.fulfill(status=403, content_type="application/json", body=body)

    page.route("**/api/overview", answer)
    page.route("**/api/history*", lambda route: held.append(route))
    tab.open("#/overview")
    page.wait_for_selector("#connection >> text=Refused: the token of viewer has produce")
    page.unroute("**/api/history*")
    for route in held:
        route.continue_()
    page.wait_for_selector("#history [data-as-of], #history[data-as-of]")
    assert page.locator("#connection").is_visible()  # the answer that another part of the page got says nothing
    page.wait_for_selector("[data-stage=router]", timeout=60_000)
    tab.wait("() => document.getElementById('connection').hidden")


def test_a_token_that_may_not_look_is_told_its_roles_and_what_it_needs(tab, broker):
    page = enter(tab, broker.producer, "#/letters/bills")
    text = "Refused: the token of sender has produce and may not do letters; this needs consume: kmq token new"
    page.wait_for_selector(f"#connection >> text={text}")


def test_a_token_that_only_reads_is_told_why_it_cannot_change_anything(tab, broker):
    page = enter(tab, broker.reader, "#/groups/ledger")
    page.wait_for_selector("[data-place='bills/0']")
    page.wait_for_selector("text=This session only reads")
    assert page.get_by_role("button", name="Reset…").is_disabled()


def test_a_reset_waits_until_the_group_is_known(tab, broker):
    page = enter(tab, broker.all_roles, "#/overview")
    page.route("**/api/groups/ledger", lambda route: None)  # no answer
    tab.open("#/groups/ledger")
    button = page.get_by_role("button", name="Reset…")
    button.wait_for()
    assert button.is_disabled()
    page.unroute("**/api/groups/ledger")
    page.reload()
    page.wait_for_selector("main button.danger:enabled")


def test_a_reset_shows_its_dry_run_and_changes_only_after_a_yes(tab, broker):
    page = enter(tab, broker.all_roles, "#/groups/ledger")
    button = page.get_by_role("button", name="Reset…")
    page.wait_for_selector("main button.danger:enabled")
    button.click()
    page.wait_for_selector("dialog[open] >> text=Dry run")
    assert page.locator("dialog tbody td").all_inner_texts() == ["4", "0"]
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Nothing was changed")
    assert committed(broker) == 4
    button.click()
    page.wait_for_selector("dialog[open]")
    page.locator("dialog").get_by_role("button", name="Reset").click()
    page.wait_for_selector("text=Done: 1 partition of bills reset")
    assert committed(broker) == 0
    tab.wait("() => document.querySelector('[data-field=committed]')?.dataset.value === '0'")


def test_dead_letters_go_back_after_a_dry_run_and_a_yes(tab, broker):
    call(broker, "/api/admin/topics", {"name": "sent", "maxDeliveries": 1})
    call(broker, "/api/topics/sent/produce?format=text", {"value": "bill"})
    call(broker, "/api/topics/sent/consume?group=ledger&member=m&timeoutMs=20000")
    call(broker, "/api/topics/sent/nack", {"group": "ledger", "partition": 0, "offset": 0, "reason": "no such account"})
    page = enter(tab, broker.all_roles, "#/letters/sent.dlq")
    page.wait_for_selector("main button.danger:enabled")
    page.wait_for_selector(".now:has-text('1 letter, as of') details:has-text('1 example')")
    page.get_by_role("button", name="Replay…").click()
    page.wait_for_selector("dialog[open] >> text=1 letter would be sent again to where it came from")
    assert call(broker, "/api/admin/topics/sent")["partitions"][0]["endOffset"] == 1
    page.locator("dialog").get_by_role("button", name="Replay").click()
    page.wait_for_selector("text=Done: 1 letter replayed")
    broker.wait(lambda: call(broker, "/api/admin/topics/sent")["partitions"][0]["endOffset"] == 2, "the letter back")


def told(page):
    """The command that a dialog shows."""
    page.wait_for_selector("dialog[open] .command")
    return page.locator("dialog .command").text_content()


def run(broker, command):
    assert broker.all_roles not in command, "a command holds no token"
    env = {**os.environ, "token": broker.all_roles}
    found = subprocess.run(["sh", "-c", command], env=env, capture_output=True, check=True, timeout=60)
    return json.loads(found.stdout)


def opened(page, title):
    """Open a form that is folded away, and return it when it may be used."""
    place = page.locator("details", has=page.locator(f"summary:text-is('{title}')"))
    place.locator("summary").press("Enter")
    place.locator("button[type=submit]:enabled").wait_for()
    return place


def test_a_topic_is_created_only_after_a_yes_and_the_command_shown_does_the_same(tab, broker):
    page = enter(tab, broker.all_roles, "#/topics")
    form = opened(page, "Create a topic")
    form.locator("[name=name]").fill("made")
    form.locator("[name=partitions]").fill("2")
    form.locator("[name=retentionMs]").fill("7 d")
    form.get_by_role("button", name="Create…").press("Enter")
    command = told(page)
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Nothing was changed")
    assert "made" not in {topic["name"] for topic in call(broker, "/api/topics")}
    form.get_by_role("button", name="Create…").press("Enter")
    page.wait_for_selector("dialog[open]")
    page.locator("dialog").get_by_role("button", name="Create").press("Enter")
    page.wait_for_selector("text=Done: topic made has 2 partitions")
    again = run(broker, command)  # an equal topic exists
    assert (again["retentionMs"], len(again["partitions"])) == (7 * 86_400_000, 2)
    page.wait_for_selector("[data-topic=made]")


def test_limits_are_changed_and_what_is_no_limit_is_said(tab, broker):
    call(broker, "/api/admin/topics", {"name": "limited", "retentionMs": 1000 * 3600})
    page = enter(tab, broker.all_roles, "#/topics/limited")
    form = opened(page, "Change its limits")
    tab.wait("() => document.querySelector('[name=retentionMs]').placeholder === '60 min'")
    form.locator("[name=retentionBytes]").fill("ten")
    form.get_by_role("button", name="Change…").press("Enter")
    page.wait_for_selector("text=Not done: Kept up to: ten is not a number with B, KiB")
    form.locator("[name=retentionBytes]").fill("10 GiB")
    form.locator("[name=retentionMs]").fill("no limit")
    form.get_by_role("button", name="Change…").press("Enter")
    found = run(broker, told(page))
    assert (found["retentionBytes"], found["retentionMs"]) == (10 << 30, -1)
    page.keyboard.press("Escape")
    form.locator("[name=retentionMs]").fill("2 h")
    form.get_by_role("button", name="Change…").press("Enter")
    page.wait_for_selector("dialog[open]")
    page.locator("dialog").get_by_role("button", name="Change").press("Enter")
    page.wait_for_selector("text=Done: limits of limited changed")
    assert call(broker, "/api/admin/topics/limited")["retentionMs"] == 2 * 3_600_000


def test_a_message_is_produced_with_key_and_headers_and_then_shown(tab, broker):
    call(broker, "/api/admin/topics", {"name": "typed"})
    page = enter(tab, broker.all_roles, "#/topics/typed")
    form = opened(page, "Produce a message")
    value = "it's <b>\u202e 5 o'clock"
    for name, text in {"key": "k1", "value": value, "headers": "trace=a=1\n"}.items():
        form.locator(f"[name={name}]").fill(text)
    form.get_by_role("button", name="Produce…").press("Enter")
    stored = run(broker, told(page))
    assert stored["offset"] == 0
    page.locator("dialog").get_by_role("button", name="Produce").press("Enter")
    page.wait_for_selector("text=Done: stored at 0:1")
    page.wait_for_selector(".message[data-offset='1']")
    found = call(broker, "/api/topics/typed/messages")["messages"]
    assert [(one["key"], one["value"], one["headers"]) for one in found] == [
        ("k1", value, [{"name": "trace", "value": "a=1"}])
    ] * 2


def test_a_token_that_only_reads_may_not_use_the_forms(tab, broker):
    page = enter(tab, broker.reader, "#/topics/bills")
    for title in ("Change its limits", "Produce a message"):
        page.locator(f"summary:text-is('{title}')").press("Enter")
    tab.wait("() => document.querySelectorAll('details[open] p.quiet').length === 2")
    tab.wait(
        "() => document.querySelector('main').innerText.split('a token with the role admin may do this').length === 3"
    )
    assert page.locator("details[open] button[type=submit]:enabled").count() == 0


def fail(broker, topic, *reasons):
    """Make a message of a topic a letter for each of the reasons. Its topic must not have any other messages."""
    if topic not in [row["name"] for row in call(broker, "/api/admin/topics")]:
        call(broker, "/api/admin/topics", {"name": topic, "maxDeliveries": 1})
    first = call(broker, f"/api/admin/topics/{topic}")["partitions"][0]["endOffset"]
    values = [{"value": f"bill {first + n}"} for n in range(len(reasons))]
    call(broker, f"/api/topics/{topic}/produce?format=text", {"messages": values})
    for offset, reason in enumerate(reasons, first):
        call(broker, f"/api/topics/{topic}/consume?group=ledger&member=m&maxMessages=1&timeoutMs=20000")
        call(
            broker, f"/api/topics/{topic}/nack", {"group": "ledger", "partition": 0, "offset": offset, "reason": reason}
        )


def test_one_letter_goes_back_and_the_others_stay(tab, broker):
    fail(broker, "few", *["no such account"] * 3)
    page = enter(tab, broker.all_roles, "#/letters/few.dlq")
    page.wait_for_selector("section form button.danger:enabled")
    page.locator(".reason summary").press("Enter")
    row = page.locator(".reason .message", has_text="bill 1")
    row.locator(".open").press("Enter")
    row.get_by_role("button", name="Replay this one…").press("Enter")
    page.wait_for_selector("dialog[open] >> text=1 letter would be sent again")
    assert '"dryRun":false' in told(page)
    page.locator("dialog").get_by_role("button", name="Replay").press("Enter")
    page.wait_for_selector("text=Done: 1 letter replayed")

    def came_back():
        return call(broker, "/api/topics/few/messages?limit=1")["messages"][0]["value"] == "bill 1"

    broker.wait(came_back, "the letter where it came from")
    assert call(broker, "/api/admin/topics/few")["partitions"][0]["endOffset"] == 4


def letters_page(tab, token, topic, total):
    """Open the page of a topic's letters, with all its rows, once it shows so many letters."""
    page = enter(tab, token, f"#/letters/{topic}")
    page.wait_for_selector(f".now:has-text('{total} letters, as of')")
    for summary in page.locator(".reason summary").all():
        summary.press("Enter")
    return page


def redrawn(tab):
    """Wait until the page shows a document that was asked for after this moment."""
    for _ in range(2):
        as_of = tab.page.evaluate("document.getElementById('main').dataset.asOf")
        tab.wait("(old) => document.getElementById('main').dataset.asOf !== old", as_of)


def test_ticked_letters_go_back_by_keyboard_and_no_others(tab, broker):
    fail(broker, "ticked", "no such account", "late", "late", "no such account", "late")
    page = letters_page(tab, broker.all_roles, "ticked.dlq", 5)
    assert page.get_by_role("button", name="Replay ticked letters…").is_disabled()
    late = page.locator("[data-reason=late]")
    box = late.get_by_role("checkbox", name="Select letter 0:1")
    box.press("Space")
    page.locator("[data-reason='no such account']").get_by_role("checkbox", name="Select letter 0:3").press("Space")
    page.get_by_role("button", name="Replay 2 letters…").wait_for()
    every = late.get_by_role("checkbox", name="Select all shown: late")
    assert every.evaluate("(box) => [box.checked, box.indeterminate]") == [False, True]
    every.press("Space")
    button = page.locator("button:enabled", has_text="Replay 4 letters…")
    button.wait_for()
    redrawn(tab)
    assert box.is_checked() and every.evaluate("(box) => document.activeElement === box"), "a redraw keeps both"
    button.press("Enter")
    page.wait_for_selector("dialog[open] >> text=4 letters would be sent again")
    command = told(page)
    seqs = [one["seq"] for one in call(broker, "/api/topics/ticked.dlq/messages")["messages"]]
    call(broker, "/api/topics/ticked/replay", {"filter": f"seq={seqs[2]}", "dryRun": False})  # another operator
    page.locator("dialog").get_by_role("button", name="Replay").press("Enter")
    page.wait_for_selector("text=Done: 3 letters replayed; 1 had gone back before.")
    page.get_by_role("button", name="Replay ticked letters…").wait_for()
    assert not page.locator("main :checked").count(), "what is done is ticked no longer"
    found = run(broker, command)
    assert (found["replayed"], found["repeated"], found["complete"]) == (0, 4, True)

    def came_back():
        return call(broker, "/api/topics/ticked/messages")["messages"][5:]

    broker.wait(lambda: len(came_back()) == 4, "the letters where they came from")
    assert sorted(one["value"] for one in came_back()) == ["bill 1", "bill 2", "bill 3", "bill 4"]


def test_a_tick_goes_with_its_letter_and_who_only_reads_may_not_replay(tab, broker):
    fail(broker, "gone", "late", "late")
    page = letters_page(tab, broker.reader, "gone.dlq", 2)
    tab.wait("() => document.getElementById('who').textContent.includes('viewer')")
    page.get_by_role("checkbox", name="Select all shown: late").press("Space")
    assert page.get_by_role("button", name="Replay 2 letters…").is_disabled()
    fail(broker, "gone", *["late"] * 4)  # five of a reason are shown
    page.get_by_role("button", name="Replay 1 letter…").wait_for()
    assert page.locator(".message").count() == 5
    ticked = page.locator(".message", has=page.locator(":checked"))
    assert [row.get_attribute("data-offset") for row in ticked.all()] == ["1"]
    assert page.locator("thead :checked").count() == 0
