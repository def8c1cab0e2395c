"""What the documents point at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests/README.md", ROOT / "pipes/README.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_of_the_repository(path):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"(?ms)^```.*?^```", "", path.read_text()))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


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
