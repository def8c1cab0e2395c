"""What a type checker tells users of the package: `py.typed` says that it can be asked."""

import subprocess
import sys

USER = """
import kmq

def store(lines: list[bytes]) -> int:
    with kmq.Producer(port=5673, producer="mine", linger_ms=5) as producer:
        delivery = producer.send("orders", b"one", key="42")
        producer.send_many("orders", lines)
        return delivery.result()

async def store_too() -> int:
    async with kmq.AsyncProducer.local(stall_s=1.0) as producer:
        try:
            return await producer.send("orders", b"one")
        except kmq.Refused as err:
            print(err.code, kmq.decode_payload(b"", b""))
        except (kmq.Fenced, kmq.NotAnswered, kmq.KmqError):
            pass
    return 0

def tell() -> int:
    with kmq.BroadcastQueue() as queue:
        for item in queue.receive(timeout=1.0):
            print(item.epoch)
        return queue.publish("greeting", "hello") + len(queue.status().nodes)

async def tell_too() -> int:
    async with kmq.AsyncBroadcastQueue() as queue:
        async for item in queue.receive(start=3):
            print(item.epoch)
        return await queue.publish("greeting", b"hello")
"""
WRONG = """
import kmq

kmq.Producer(linger="5")
kmq.Producer(window=5)
"""


def checked(path, text):
    path.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(path.parent / "cache"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=path.parent)


def test_a_users_program_is_checked_strictly_and_what_is_wrong_in_it_is_told(tmp_path):
    good = checked(tmp_path / "user.py", USER)
    assert good.returncode == 0, good.stdout
    wrong = checked(tmp_path / "wrong.py", WRONG)
    assert 'Unexpected keyword argument "linger"' in wrong.stdout, wrong.stdout
    assert 'Argument "window"' in wrong.stdout, wrong.stdout
