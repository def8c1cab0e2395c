"""`scripts/check-gap` with every awk that is installed: what it finds, and what it ends with."""

import shutil
import subprocess

import pytest

AWKS = [awk for awk in (["awk"], ["mawk"], ["gawk"], ["busybox", "awk"]) if shutil.which(awk[0])]


@pytest.fixture(params=AWKS, ids=lambda awk: awk[0])
def check_gap(request, scripts, tmp_path):
    """Runs check-gap; returns (exit code, findings, fields of the last line)."""

    def run(*arguments):
        command = [*request.param, "-f", str(scripts / "check-gap"), *arguments]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        *findings, last = result.stdout.splitlines() or [""]
        return result.returncode, findings, dict(field.split("=") for field in last.split())

    return run


@pytest.fixture
def write(tmp_path):
    def write(name, *seqs):
        text = "".join(f"{seq}|1.000000|t.k|0|1|pay|load\n" if str(seq).isdigit() else f"{seq}\n" for seq in seqs)
        (tmp_path / name).write_text(text)
        return name

    return write


WHOLE = {"gaps": "0", "missing": "0", "duplicates": "0", "out_of_order": "0", "malformed": "0", "result": "pass"}


def test_segments_that_follow_one_another_are_whole(check_gap, write):
    code, findings, last = check_gap(write("1.log", 1, 2, 3), write("4.log", 4, 5))
    assert (code, findings) == (0, [])
    assert last == WHOLE | {"first_seq": "1", "last_seq": "5", "records": "5", "dropped": "0"}


@pytest.mark.parametrize(
    ("seqs", "finding"),
    [
        ([1, 2, 5], "finding=gap first_seq=3 last_seq=4 count=2"),
        ([1, 2, 2, 3], "finding=duplicate seq=2 file=a line=3"),
        ([1, 3, 2, 4], "finding=out_of_order seq=2 after=3 file=a line=3"),
        ([5, 6, 4], "finding=out_of_order seq=4 after=6 file=a line=3"),
        ([1, "2|torn", 2], "finding=malformed file=a line=2"),
        ([10**15, 10**15 + 2], f"finding=gap first_seq={10**15 + 1} last_seq={10**15 + 1} count=1"),
    ],
)
def test_each_damage_is_found_once_and_named(check_gap, write, seqs, finding):
    code, findings, last = check_gap(write("a", *seqs))
    assert (code, findings, last["result"]) == (1, [finding], "fail")


def test_a_record_that_comes_late_fills_its_gap_and_coming_again_is_a_duplicate(check_gap, write):
    code, findings, last = check_gap(write("a", 1, 9, 5, 5, 3))
    assert code == 1
    assert findings == [
        "finding=out_of_order seq=5 after=9 file=a line=3",
        "finding=duplicate seq=5 file=a line=4",
        "finding=out_of_order seq=3 after=9 file=a line=5",
        "finding=gap first_seq=2 last_seq=2 count=1",
        "finding=gap first_seq=4 last_seq=4 count=1",
        "finding=gap first_seq=6 last_seq=8 count=3",
    ]
    assert last["missing"] == "5"


def test_what_dropped_log_names_is_no_gap_but_the_rest_is(check_gap, write):
    dropped = write("dropped.log", "framed|2|3|2|1.0", "framed|6|7|2|1.0", "durable|8|8|1|1.0")
    code, findings, last = check_gap(write("a", 1, 4, 5, 9), dropped)
    assert (code, findings) == (1, ["finding=gap first_seq=8 last_seq=8 count=1"])
    assert (last["dropped"], last["missing"]) == ("4", "1")
    assert check_gap(write("a", 1, 4, 5, 8), dropped)[0] == 0


def test_from_and_to_ask_for_exactly_these_seqs(check_gap, write):
    log = write("a", *range(1, 11))
    assert check_gap("from=3", "to=7", log)[2]["records"] == "5"
    assert check_gap("from=3", "to=12", log)[1] == ["finding=gap first_seq=11 last_seq=12 count=2"]
    assert check_gap("from=20", "to=21", log)[1] == ["finding=gap first_seq=20 last_seq=21 count=2"]


def test_what_compaction_took_away_and_an_empty_log_are_no_damage(check_gap, write):
    assert check_gap(write("a", 1, 2, ""))[0] == 0
    assert check_gap(write("empty"))[0] == 0


def test_a_file_that_cannot_be_read_is_not_a_whole_log(check_gap):
    assert check_gap("nosuch.log")[0] == 2
