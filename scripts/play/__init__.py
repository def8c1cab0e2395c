"""Plays what k8s/ holds as a real pod on this machine, with podman, and does for it what the kubelet would do.

No API server and no registry: the overlay is rendered, the pods of its StatefulSet or Deployment are taken out of it, and what
podman's `kube play` does not know is put in terms it knows (`ADAPTATIONS`; each is made in a function that says so). What it
has is used as the manifest says: containers, commands, settings, ids, read-only roots, capabilities, seccomp, limits, one IPC,
network and process namespace. Probes run from outside, by `Pod.probe` and `Kubelet`.

Needs root (`scripts/pod-setup`). Everything of a pod is removed with it. The next player removes what a killed player left.
"""

from play.engine import HOME, ROOT, PlayError, podman, remove, remove_leftovers
from play.kubelet import Kubelet
from play.manifest import ADAPTATIONS, Document, render
from play.pod import Pod, play
from play.pods import Pods, play_all

__all__ = [
    "ADAPTATIONS",
    "HOME",
    "ROOT",
    "Document",
    "Kubelet",
    "PlayError",
    "Pod",
    "Pods",
    "play",
    "play_all",
    "podman",
    "remove",
    "remove_leftovers",
    "render",
]
