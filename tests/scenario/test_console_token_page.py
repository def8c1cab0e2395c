"""The console of a broker with tokens: one is typed once, and what changes anything is shown before it is done.

Invariant   Without a token nothing is shown. A token is kept in sessionStorage alone. Nothing changes before a dry run was
            shown and confirmed.
"""

import json
import urllib.request

import pytest
from brokers import Broker
from browsers import Watched, chromium, http_base

from kmq.access import tokens


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
    """Open a page and type the token when the console asks for it."""
    page = tab.open(hash)
    page.wait_for_selector("dialog[open]")
    page.fill("dialog input", token)
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog", state="detached")
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
    page.get_by_role("button", name="Replay…").click()
    page.wait_for_selector("dialog[open] >> text=1 letter would be sent again")
    assert call(broker, "/api/admin/topics/sent")["partitions"][0]["endOffset"] == 1
    page.locator("dialog").get_by_role("button", name="Replay").click()
    page.wait_for_selector("text=Done: 1 letter replayed")
    broker.wait(lambda: call(broker, "/api/admin/topics/sent")["partitions"][0]["endOffset"] == 2, "the letter back")
