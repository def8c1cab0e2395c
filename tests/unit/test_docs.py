"""What the documents point at is there, and what the code has to tell users stands in them."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_tree import every_command, is_group
from syntax_trees import nodes

from kmq import errors
from kmq.broker import health
from kmq.config import settings
from kmq.gateway.core import metrics
from kmq.gateway.core.topics import OPTIONS
from kmq.gateway.http.openapi import document
from kmq.links import layout, received
from kmq.log.segment import LIMITS
from kmq.message import record
from kmq.replica import wire
from kmq.spark.sink import targets
from kmq.spark.source import options as source
from kmq.wire import refusals

ROOT = Path(__file__).parents[2]
MOVED = {  # pages under their old names, which links from outside still have
    path for path in (ROOT / "docs").glob("*.md") if path.read_text().startswith("# Moved\n")
}
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests/README.md", ROOT / "pipes/README.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_of_the_repository(path):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"(?ms)^```.*?^```", "", path.read_text()))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_leads_to_the_old_name_of_a_page(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    assert [link for link in links if (path.parent / link).resolve() in MOVED] == []


def test_a_page_that_has_moved_only_leads_on_and_no_code_names_it():
    assert {len(path.read_text().splitlines()) for path in MOVED} <= {3, 4}
    names = "|".join(path.stem for path in MOVED)
    files = [path for room in ("kmq", "stages", "k8s", "scripts", "tests") for path in (ROOT / room).rglob("*")]
    texts = {path: path.read_bytes() for path in files if path.suffix in ("", ".py", ".yaml", ".md") and path.is_file()}
    assert texts and [path for path, text in texts.items() if re.search(rf"docs/({names})\.md".encode(), text)] == []


def anchors(page):
    """What `#…` may name: each heading in lower case, without punctuation, with - for blanks."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_into_a_page_leads_to_a_heading(path):
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", re.sub(r"(?ms)^```.*?^```", "", path.read_text()))
    within = [(name, anchor) for name, anchor in links if "://" not in name]
    pages = {name: (path.parent / name if name else path).read_text() for name, _ in within}
    assert [f"{name}#{anchor}" for name, anchor in within if anchor not in anchors(pages[name])] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_of_the_repository_that_is_named_is_there(path):
    named = re.findall(r"`((?:kmq|stages|tests|scripts|k8s|docs)/[\w./-]+)`", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_guarantee_names_tests_that_are_there():
    text = (ROOT / "docs/guarantees.md").read_text()
    parts = re.split(r"(?m)^## ", text)[1:]
    assert [part[:2] for part in parts[:9]] == [f"G{number}" for number in range(1, 10)]
    for part in parts[:9]:
        named = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", part)
        assert len(named) >= 2, part
        for path, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path}::{name}"


def test_the_tests_readme_has_every_folder():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "tests/README.md").read_text(), re.M))


# --- what the code has, and the documents must name ----------------------------------------------------------------

_LOGS = {"info", "warn", "error", "_info", "_warn", "_error"}  # functions that write a log event
_NOTES = {"note"}  # and those of Incidents and Strangers
_NOTERS = re.compile(r"(?:.*\b_?)?(?:incidents|strangers)|self")
_EVENT = re.compile(r"[a-z]+(?:_[a-z]+)*")


def _sources():
    return [*(ROOT / "kmq").rglob("*.py"), *(ROOT / "stages").rglob("*.py")]


def _logged(source):
    """The log events that a module writes: the first argument of what logs, where it is one word."""
    for node in nodes(source):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            logs = name in _LOGS or (name in _NOTES and _NOTERS.fullmatch(owner))
            if logs and isinstance(node.args[0].value, str) and _EVENT.fullmatch(node.args[0].value):
                yield node.args[0].value


@cache
def _all_logged():
    return {event for path in _sources() for event in _logged(path.read_text())}


def _section(path, title):
    """The text under a heading, up to the next heading of its level or above."""
    level, text = len(title) - len(title.lstrip("#")), (ROOT / path).read_text()
    found = re.search(rf"(?ms)^{re.escape(title)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text)
    assert found, f"{path} has no section {title}"
    return found[1]


def _first_cells(text):
    return set(re.findall(r"(?m)^\| `?([^`|]+?)`? \|", text))


def test_every_log_event_has_its_row_and_no_other():
    code = _all_logged() | set(health.WARNINGS)
    told = _first_cells((ROOT / "docs/log-events.md").read_text()) - {"event", "---"}
    assert code - told == set(), "write them into docs/log-events.md, with what to do"
    assert told - code == set(), "docs/log-events.md explains log events that nothing writes"


def test_every_exit_code_has_its_row_and_no_other():
    told = _first_cells(_section("docs/running.md", "## Exit codes")) - {"code", "---"}
    assert told == {str(code) for code in (*errors.EXIT_NAMES, 2)}


def test_every_reason_not_to_be_ready_and_every_warning_has_a_runbook():
    told = set(re.findall(r"(?m)^### (\w+)$", _section("docs/operations.md", "## Runbook")))
    assert {*health.REASONS, *health.WARNINGS} <= told


def test_every_alert_of_the_manifests_has_a_runbook():
    told = set(re.findall(r"(?m)^### (\w+)$", _section("docs/operations.md", "## Runbook")))
    found = "".join(path.read_text() for path in (ROOT / "k8s").rglob("*.yaml"))
    sections = re.findall(r"(?m)^\s*runbook_url: \S+/docs/operations\.md#(\w+)$", found)
    assert len(sections) == len(re.findall(r"(?m)^\s*-? ?alert: (\w+)", found)) > 20
    assert set(sections) - told == set()


def test_every_reason_for_dead_malformed_is_in_the_protocol():
    told = _first_cells(_section("docs/protocol.md", "## Lines that are no message")) - {"reason", "---"}
    lines = [b"", b"x", b"|a", b".a|", b"append|x", b"a|\0", b"!a|"]
    reasons = {record.refusal(line) for line in lines} | {"too_long", "no_newline", "not_json"}
    assert len(reasons) == 10
    assert told == reasons | {"too_many_topics", "unknown_topic", "unknown_partition"}  # those of the framer's catalog


def test_every_refusal_code_is_in_the_protocol():
    told = _first_cells(_section("docs/protocol.md", "## Refusal codes")) - {"code", "---"}
    assert told == {row.code for row in refusals.table()}


def test_every_path_of_the_api_is_on_a_page():
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("http.md", "gateway.md", "console.md"))

    def is_told(path):
        return re.search(re.sub(r"\{[^}]+\}", r"[^/\\s`?]+", path) + r"(?![/\w])", pages)

    paths = set(document()["paths"]) - {"/console/{file}"}  # the files of the page
    assert len(paths) > 30 and {path for path in paths if not is_told(path)} == set()


def test_every_option_of_a_topic_is_on_a_page():
    told, over_http = ((ROOT / "docs" / page).read_text() for page in ("storage.md", "http.md"))
    assert [name for name in LIMITS if f"`{name}`" not in told] == []
    assert [name for name in OPTIONS if f"`{name}`" not in over_http] == []


def test_every_option_of_the_spark_source_and_sink_is_on_a_page():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("spark*.md"))
    names = {*source.OPTIONS, *targets.OPTIONS} - {"paths"}  # as Spark passes load([a, b]), which is told
    assert [name for name in names if name not in pages] == []


def test_every_kind_of_public_name_is_printed():
    script = ROOT / "scripts/public-names"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.splitlines()
    kinds = Counter(line.split()[0].partition(".")[0] for line in printed)
    wanted = ["python", "command", "setting", "http", "proto", "metric", "refusal", "exit", "spark"]
    assert {kind for kind in wanted if kinds[kind] < 5} == set()
    assert {"python Consumer.poll", "spark source startingOffsets"} <= {line.partition("(")[0] for line in printed}


def test_every_command_is_on_a_page():
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    rows = re.findall(r"(?m)^\| (`kmq .*?) \|", pages.replace("\\|", " "))

    def is_told(*words):
        return " ".join(words) in pages or any(
            " ".join(words[:-1]) in row and re.search(rf"\b{words[-1]}\b", row) for row in rows
        )

    known = [words for words in _known_commands() if words[:3] != ("kmq", "pipeline", "run")]  # spark.md has a row each
    assert len(known) > 40 and [words for words in known if not is_told(*words)] == []


def test_a_page_can_be_read_at_night():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / "docs").rglob("*.md")}
    assert [page for page, lines in long.items() if lines > 800] == []


def test_the_readme_is_short_and_its_second_command_runs_the_tests():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert [command.split("#")[0].strip() for command in re.findall(r"(?m)^\$ (.*)$", text)][:2] == [
        "make demo",
        "make test",
    ]


def test_the_picture_of_the_pod_has_every_process_and_link_of_its_stages():
    assert "](docs/pod.svg)" in (ROOT / "README.md").read_text()
    texts = {text.text for text in ElementTree.parse(ROOT / "docs/pod.svg").iter("{http://www.w3.org/2000/svg}text")}
    rings = {f"ring {name}" for name in (*layout.RINGS, received.NAME)}
    assert {*settings.STAGES, "gateway", *rings, "FIFO raw"} - texts == set()


def test_what_a_make_target_takes_is_told_alike_wherever_it_is_told():
    """`make check`: lint and the unit tests; `make test`: everything but the soak."""
    pages = {
        name: " ".join((ROOT / name).read_text().split())
        for name in ("CONTRIBUTING.md", "tests/README.md", "README.md")
    }
    told = {name: set(re.findall(r"about (\d+ minutes?)", page)) for name, page in pages.items()}
    assert told["README.md"] == {"35 minutes"}
    assert told["CONTRIBUTING.md"] == told["tests/README.md"] == {"35 minutes", "3 minutes"}


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("docs/architecture.md", "## The way of a line"),
        ("docs/maintaining.md", "## The role of a broker in a shard"),
    ],
)
def test_the_steps_of_a_way_name_functions_that_are_there(page, title):
    steps = re.findall(r"(?m)^\| (\d+)\. .*? \| `(\S+)` \| `(\w+)` \|$", _section(page, title))
    assert [int(number) for number, *_ in steps] == list(range(1, len(steps) + 1)) and len(steps) > 10
    for _, path, function in steps:
        assert re.search(rf"^ *(async )?def {function}\(", (ROOT / path).read_text(), re.M), f"{path}: {function}"


def test_every_module_of_the_kafka_door_is_in_architecture():
    told = set(re.findall(r"`(\w+\.py)`", _section("docs/architecture.md", "## The Kafka door")))
    assert told == {path.name for path in (ROOT / "kmq/gateway/kafka").glob("*.py")} - {"__init__.py"}


def test_every_text_between_replicas_is_in_the_protocol_with_its_fields():
    page = _section("docs/protocol.md", "## Between replicas")
    texts = re.findall(r"(!\w+)((?: \w+=[^\s`]+)*)", page)
    told = {(word, *re.findall(r" (\w+)=", fields)) for word, fields in texts}
    assert {(word, *wire._NAMES[form]) for word, form in wire._TYPES.items()} - told == set()
    assert {word for word, *_ in told} - wire._TYPES.keys() == {"!replica", "!challenge", "!proof"}


def test_every_room_and_module_has_its_floor_in_architecture():
    told = set(re.findall(r"`([\w/.]+)`", _section("docs/architecture.md", "## Rooms and floors")))
    entries = {path for path in (ROOT / "kmq").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    names = {f"kmq/{path.name}/" if path.is_dir() else path.stem for path in entries} - {"__init__"}
    assert {name for name in names if name not in told and f"kmq/{name}.py" not in told} == set()


def test_every_page_and_decision_is_in_the_list():
    links = set(re.findall(r"\]\(([^)#]+)", (ROOT / "docs/README.md").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md") if path not in MOVED}
    assert pages - {"README.md"} - links == set()


def test_every_page_is_behind_one_door_and_each_door_has_a_page_to_start_from():
    doors = {title: _section("docs/README.md", f"## {title}") for title in ("Use", "Operate", "Spark", "Change")}
    starts = {title: re.match(r"\nStart with \[([\w-]+\.md)\]\(\1\): ", text) for title, text in doors.items()}
    assert all(starts.values())
    listed = Counter(found[1] for found in starts.values() if found)
    listed += Counter(
        page for text in doors.values() for page in re.findall(r"(?m)^\| \[([\w-]+\.md)\]\(\1\) \|", text)
    )
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if path not in MOVED} - {"README.md"}
    assert listed == Counter(pages)


def test_every_metric_has_its_row_with_its_description():
    told = re.findall(r"(?m)^\| `(kmq_\w+)` \| (.*?) \| (.*) \|$", (ROOT / "docs/metrics.md").read_text())
    assert told == [(name, ", ".join(f"`{each}`" for each in labels), help) for name, help, labels in metrics.DECLARED]


def test_the_settings_table_is_the_one_the_code_has():
    block = re.search(r"<!-- settings -->\n(.*?)\n<!-- /settings -->", (ROOT / "docs/settings.md").read_text(), re.S)
    assert block and block[1] == settings.table(), (
        "paste: python -c 'from kmq.config.settings import table; print(table())'"
    )


def test_the_scan_for_log_events_sees_calls_of_loggers_and_no_other_text():
    events = ['log.info("a_b", x=1)', 'self._warn("c")', 'warn("d_e", 1)', 'self._incidents.note("g", "")']
    others = ['verify.note("h")', 'log.error("not one word")', 'print("f")', "log.warn(code)"]
    assert set(_logged("\n".join(events + others))) == {"a_b", "c", "d_e", "g"}


def test_every_log_event_named_in_a_page_is_one():
    code = _all_logged() | set(health.WARNINGS)
    named = {event for path in DOCUMENTS if path.name != "CHANGELOG.md" for event in _events_named(path.read_text())}
    assert named - code == set()


def _events_named(page):
    return re.findall(r"\bevent=([a-z_]+)", page)


@cache
def _known_commands():
    """Return words of a command -> its options, for every command there is."""
    return {
        ("kmq", *words): {
            word for each in command.params for word in (*each.opts, *each.secondary_opts) if word[0] == "-"
        }
        | {"-h", "--help"}
        for words, command in every_command()
        if not is_group(command)
    }


def _unknown_commands(page):
    known = _known_commands()
    wrong = []
    for line in re.findall(r"(?:`|^\$ |&& |\| )(kmq [a-z][^`\n|&]*)", page, re.M):
        words = re.sub(r"(?:\s#|\s-- ).*|\\|<[^>]*>|\[|\]|…", " ", line).split()
        names = next((tuple(words[:n]) for n in (4, 3, 2) if tuple(words[:n]) in known), None)
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        if (names is None and tuple(words[:2]) not in {each[:2] for each in known}) or (
            names and options - known[names]
        ):
            wrong.append(line)
    return wrong


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_in_a_page_is_there_with_its_options(path):
    assert path.name == "CHANGELOG.md" or _unknown_commands(path.read_text()) == []


def test_a_command_or_an_option_that_is_not_there_is_found():
    page = "$ kmq up && kmq down\n`kmq produce x --akcs`\n`kmq sing`\n$ kmq verify --repair  # --not-this\n"
    assert _unknown_commands(page) == ["kmq produce x --akcs", "kmq sing"]


def test_the_glossary_does_not_deny_a_word_that_it_explains():
    page = (ROOT / "docs/glossary.md").read_text()
    explained = set(re.findall(r"^\| ([^|]+?) \|", page, re.M))
    denied = set(re.findall(r"(?:: |, )([\w ]+?) \(", page[page.index("that KMQ does not have") :].replace("\n", " ")))
    assert denied and not denied & explained
