"""A client that a public generator makes of /openapi.json works: with types, without a hand-written line."""

import subprocess
import sys

import pytest
from brokers import Broker

GENERATOR = "openapi-python-client"
USE = """
import base64, sys
from kmq_client import Client
from kmq_client.api.messages import consume, produce
from kmq_client.api.topics import create_topic, describe_topic, delete_topic, list_topics
from kmq_client.models import BatchProduce, Error, NewMessage, NewTopic, SingleProduce

client = Client(base_url=sys.argv[1])
made = create_topic.sync(client=client, body=NewTopic(name="orders", partitions=2))
assert [part.end_offset for part in made.partitions] == [0, 0], made
value = base64.b64encode(b"hello").decode()
one = produce.sync("orders", client=client, body=SingleProduce(value=value, key=None, partition=1))
assert (one.topic, one.partition, one.offset) == ("orders", 1, 0), one
batch = BatchProduce(messages=[NewMessage(value=value, partition=1), NewMessage(value=None, partition=7)])
stored, failed = produce.sync("orders", client=client, body=batch).results
assert stored.offset == 1 and failed.error.code == "unknown_partition", (stored, failed)
found = consume.sync("orders", client=client, partition=1, max_messages=10)
assert [message.value for message in found.messages] == [value, value], found
assert found.positions[0].offset == 2
refused = consume.sync("nobody", client=client)
assert isinstance(refused, Error) and refused.code == "unknown_topic", refused
assert [topic.name for topic in list_topics.sync(client=client)] == ["orders"]
assert delete_topic.sync_detailed("orders", client=client).status_code == 204
print("done")
"""


@pytest.mark.soak
def test_a_client_made_by_a_public_generator_works(tmp_path):
    python = f"{tmp_path}/venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", f"{tmp_path}/venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", GENERATOR], check=True, timeout=600)
    broker = Broker(tmp_path / "b")
    try:
        broker.up()
        status, document = broker.get("/openapi.json")
        assert status == 200
        (tmp_path / "openapi.json").write_text(document)
        command = [f"{tmp_path}/venv/bin/{GENERATOR}", "generate", "--path", "openapi.json", "--meta", "none"]
        made = subprocess.run(
            [*command, "--output-path", "kmq_client"], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert made.returncode == 0, made.stdout + made.stderr
        said = made.stdout + made.stderr  # the generator knows no NDJSON, and everything else
        assert said.count("Unsupported") == said.count("WARNING") == 1 and "Unable" not in said, said
        port = (broker.pipes / "http.port").read_text().strip()
        used = subprocess.run(
            [python, "-c", USE, f"http://127.0.0.1:{port}"], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert used.stdout == "done\n", used.stdout + used.stderr
    finally:
        broker.close()
