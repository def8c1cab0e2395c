"""As much of a Kubernetes API server as Spark asks: pods of one namespace, kept in memory, watched, and run by a kubelet of ours.

What it is asked is written down, so that a test can hold it against the rights that the manifests give.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlsplit

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

Document = dict[str, Any]  # a pod, an event, a status
Query = dict[str, list[str]]


class ApiServer:
    """`start(pod)` is called with each pod that is made and returns what ends it; `url` is for --master k8s://."""

    def __init__(self, start: Callable[[Document], Callable[[], object]]) -> None:
        self.asked: set[tuple[str, str]] = set()  # (verb, resource)
        self.made: list[Document] = []  # pods as they were asked for
        self.pods: dict[str, Document] = {}
        self._start = start
        self._end: dict[str, Callable[[], object]] = {}
        self._events: list[Document] = []
        self._changed = threading.Condition()
        self._numbers = count(1)
        server = self

        class Handler(_Handler):
            api = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "ApiServer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.pods):
            self.delete(name)
        self._http.shutdown()
        self._http.server_close()

    def put(self, pod: Document) -> Document:
        """A pod that runs, as if the API had been asked for it; returns it as it is stored."""
        number = next(self._numbers)
        pod["metadata"] |= {"uid": f"uid-{number}", "namespace": "default", "creationTimestamp": "2026-01-01T00:00:00Z"}
        ready = [{"type": "Ready", "status": "True"}]
        pod["status"] = {"phase": "Running", "podIP": f"127.0.0.{number}", "conditions": ready}
        self._tell("ADDED", pod)
        return pod

    def create(self, pod: Document) -> Document:
        self.made.append(json.loads(json.dumps(pod)))
        stored = self.put(pod)
        self._end[pod["metadata"]["name"]] = self._start(stored)
        return stored

    def delete(self, name: str) -> None:
        pod = self.pods[name]
        self._end.pop(name, lambda: None)()
        self._tell("DELETED", pod)

    def _tell(self, what: str, pod: Document) -> None:
        with self._changed:
            pod["metadata"]["resourceVersion"] = str(len(self._events) + 1)
            if what == "DELETED":
                self.pods.pop(pod["metadata"]["name"])
            else:
                self.pods[pod["metadata"]["name"]] = pod
            self._events.append({"type": what, "object": pod})
            self._changed.notify_all()

    def selected(self, query: Query) -> Callable[[Document], bool]:
        """Whether a pod is asked for: by labels, name=value or name!=value, and by fields, of which only the name is known."""
        terms = [
            (term.partition("=")[0], term.partition("=")[2], where)
            for where in ("label", "field")
            for term in ",".join(query.get(f"{where}Selector", ())).split(",")
            if term
        ]

        def is_asked_for(pod: Document) -> bool:
            labels = pod["metadata"].get("labels", {})
            for name, value, where in terms:
                held = labels.get(name.rstrip("!")) if where == "label" else pod["metadata"]["name"]
                if (held == value) == name.endswith("!"):
                    return False
            return True

        return is_asked_for

    def _has_more(self, at: int) -> bool:
        return len(self._events) > at

    def watch(self, query: Query, patience_s: float = 30.0) -> Iterator[Document]:
        """Events from a version on, as they come."""
        at, is_wanted = int(query.get("resourceVersion", ["0"])[0] or 0), self.selected(query)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            with self._changed:
                self._changed.wait_for(partial(self._has_more, at), 1)
                events, at = self._events[at:], len(self._events)
            yield from (event for event in events if is_wanted(event["object"]))

    def listing(self, query: Query) -> Document:
        found = [pod for pod in list(self.pods.values()) if self.selected(query)(pod)]
        return {
            "apiVersion": "v1",
            "kind": "PodList",
            "metadata": {"resourceVersion": str(len(self._events))},
            "items": found,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ApiServer

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = url.path.strip("/").split("/")  # api v1 namespaces default pods [name]
        resource, name = [*parts[4:], "", ""][:2] if parts[2:3] == ["namespaces"] else (url.path, "")
        is_watch = query.get("watch") == ["true"]
        verb = _VERBS.get(self.command) or ("watch" if is_watch else "get" if name else "list")
        if verb == "delete" and not name:
            verb = "deletecollection"
        self.api.asked.add((verb, resource))
        if resource != "pods":
            return self._answer(404, {"kind": "Status", "status": "Failure", "code": 404, "message": "no such thing"})
        if verb == "watch":
            return self._stream(query)
        if verb == "create":
            return self._answer(201, self.api.create(json.loads(body)))
        if verb == "list":
            return self._answer(200, self.api.listing(query))
        gone = [name] if name else [pod["metadata"]["name"] for pod in self.api.listing(query)["items"]]
        if name and name not in self.api.pods:
            return self._answer(404, {"kind": "Status", "status": "Failure", "code": 404, "message": f"{name}: none"})
        if verb == "get":
            return self._answer(200, self.api.pods[name])
        for each in gone:
            self.api.delete(each)
        return self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self, code: int, what: Document) -> None:
        text = json.dumps(what).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, query: Query) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        try:
            for event in self.api.watch(query):
                text = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass  # whoever watched has gone

    def log_message(self, *args: object) -> None:
        pass
