"""What a program meets that uses the package: names, wrong parameters, and the text of a refusal."""

import subprocess
import sys

import pytest
from pages import text

import kmq
from kmq.client.consumer_options import ConsumerOptions
from kmq.client.options import Options, help_text, table_of
from kmq.sending.failures import refused_message


def test_the_package_lists_what_it_has_without_importing_it():
    code = "import sys, kmq; print(dir(kmq)); assert 'kmq.client.producer' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"'{name}'" in shown for name in ("Producer", "Consumer", "Refused", "__version__"))
    names = {}
    exec("from kmq import *", names)
    assert set(kmq.__all__) <= names.keys() and names["Producer"] is kmq.Producer


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: kmq.Producer(prot=1), r"Producer\(\) has no parameter 'prot'; did you mean 'port'\?"),
        (lambda: kmq.Producer.local(host="a"), r"Producer\.local\(\) has no parameter 'host'; it has producer, "),
        (lambda: kmq.AsyncProducer(max_batch_bites=1), r"AsyncProducer\(\) has no parameter 'max_batch_bites'; "),
        (lambda: kmq.Consumer("t", grup_id="g"), r"Consumer\(\) has no parameter 'grup_id'; did you mean 'group_id'\?"),
        (
            lambda: kmq.Consumer("t", on_asign=print),
            r"Consumer\(\) has no parameter 'on_asign'; did you mean 'on_assign'\?",
        ),
        (lambda: kmq.AsyncConsumer("t", xyz=1), r"AsyncConsumer\(\) has no parameter 'xyz'; it has group_id, member, "),
    ],
)
def test_a_wrong_parameter_is_named_with_the_call_that_has_none_of_that_name(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_a_refusal_says_what_it_means_and_nothing_of_the_payload():
    error = refused_message("too_long", b"orders.u7|1.0|7|secret" + bytes(3000))
    assert str(error) == (
        "refused by the broker: too_long: the line is over KMQ_MAX_LINE bytes (a message of 3,022 bytes for topic 'orders')"
    )
    assert (error.code, error.reason, error.line[:9]) == ("too_long", "too_long", b"orders.u7")
    assert "secret" not in str(kmq.Refused("no_separator", b"my secret"))
    assert str(kmq.Refused("of_another_version")) == "refused by the broker: of_another_version"


@pytest.mark.parametrize(
    ("options", "heading", "clients"),
    [
        (Options, "## Producer, AsyncProducer", (kmq.Producer, kmq.AsyncProducer)),
        (ConsumerOptions, "## Consumer, AsyncConsumer", (kmq.Consumer, kmq.AsyncConsumer)),
    ],
)
def test_every_option_is_in_help_and_on_its_page(options, heading, clients):
    rows = [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in table_of(options)]
    shown = text("docs/client-options.md").partition(heading + "\n")[2].partition("\n## ")[0].splitlines()
    assert [row for row in shown if row.startswith("| `")] == rows, "write:\n" + "\n".join(rows)
    assert all(help_text(options) in client.__doc__ for client in clients)
