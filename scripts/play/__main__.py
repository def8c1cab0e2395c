"""`python scripts/play dev|fleet|cluster-dev`: the pods of an overlay to play with; Ctrl-C, SIGTERM or SIGHUP ends them."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that this folder is the package `play`

import play as player  # noqa: E402
from play import ADAPTATIONS, ROOT, Kubelet, PlayError, Pod, play_all, remove_leftovers  # noqa: E402

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _lines(pods: list[Pod]) -> Iterator[str]:
    for pod in pods:
        yield f"pod {pod.name} is ready: {pod.role} at {pod.ip}"
    pod = next((pod for pod in pods if "framer" in pod.containers), pods[0])
    yield "from this machine:"
    yield f"  printf 'test.probe|0|1|hi\\n' | socat - TCP:{pod.ip}:5673"
    yield f"  tail -F {pod.volume('data')}/test.log"
    yield f"  export CONTAINERS_CONF={ROOT}/build/containers.conf"
    yield f"  podman exec -it {pod.name}-{pod.containers[-1]} kmq status"
    if "agent" in pod.containers:
        yield f"  podman exec -it {pod.name}-agent kmq fleet status"
    if "replica" in pod.containers:
        yield f"  podman exec -it {pod.name}-replica kmq cluster status"
    yield f"  podman logs {pod.name}-framer"
    yield "Ctrl-C (SIGTERM, SIGHUP) removes all and their volumes."


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
    parser.add_argument(
        "overlay",
        nargs="?",
        default="k8s/overlays/dev",
        help="directory with a kustomization, or a name in k8s/overlays",
    )
    parser.add_argument("settings", nargs="*", help="NAME=VALUE, for the ConfigMap")
    arguments = parser.parse_args()
    settings = dict(text.split("=", 1) for text in arguments.settings)
    _stop_by_signals()
    try:
        remove_leftovers()
        with play_all(arguments.overlay, **settings) as pods, ExitStack() as stack:
            kubelets = [stack.enter_context(Kubelet(pod)) for pod in pods.all]
            pods.begin_shard()
            pods.wait_ready()
            print(*_lines(pods.all), sep="\n", flush=True)
            said = dict.fromkeys(kubelets, 0)
            while True:
                time.sleep(1)
                for kubelet in kubelets:
                    for event in kubelet.events[said[kubelet] :]:
                        print(f"{kubelet.pod.role}: {event}", flush=True)
                        said[kubelet] += 1
    except PlayError as err:
        print(f"play: {err}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
