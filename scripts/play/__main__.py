"""`python scripts/play k8s/overlays/dev`: a pod to play with; Ctrl-C, SIGTERM or SIGHUP ends it."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that this folder is the package `play`

import play as player  # noqa: E402
from play import ADAPTATIONS, ROOT, Kubelet, PlayError, Pod, play, remove_leftovers  # noqa: E402

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _lines(pod: Pod) -> Iterator[str]:
    yield f"pod {pod.name} is ready; from this machine:"
    yield f"  printf 'test.probe|0|1|hi\\n' | socat - TCP:{pod.ip}:5673"
    yield f"  tail -F {pod.volume('data')}/test.log"
    yield f"  export CONTAINERS_CONF={ROOT}/build/containers.conf"
    yield f"  podman exec -it {pod.name}-{pod.containers[-1]} kmq status"
    yield f"  podman logs {pod.name}-framer"
    yield "Ctrl-C (SIGTERM, SIGHUP) removes it and its volumes."


def _stop_by_signals() -> None:
    """Let each of these end the program in order, once: what comes while the pod is removed must not stop that."""
    numbers = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup

    def stop(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, lambda number, frame: None)
        raise SystemExit(0 if number == signal.SIGINT else 128 + number)

    for number in numbers:
        signal.signal(number, stop)


def main() -> int:
    adapted = "\n".join(f"  {what}: {why}" for what, why in ADAPTATIONS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/play",
        description=player.__doc__,
        epilog=f"adapted for podman:\n{adapted}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overlay", nargs="?", default="k8s/overlays/dev", help="directory with a kustomization")
    parser.add_argument("settings", nargs="*", help="NAME=VALUE, for the ConfigMap")
    arguments = parser.parse_args()
    settings = dict(text.split("=", 1) for text in arguments.settings)
    _stop_by_signals()
    try:
        remove_leftovers()
        with play(arguments.overlay, **settings) as pod, Kubelet(pod) as kubelet:
            pod.wait_ready()
            print(*_lines(pod), sep="\n", flush=True)
            said = 0
            while True:
                time.sleep(1)
                for event in kubelet.events[said:]:
                    print(event, flush=True)
                    said += 1
    except PlayError as err:
        print(f"play: {err}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
