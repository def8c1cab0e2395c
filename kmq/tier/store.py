"""The store: keys and bytes, in a bucket (`s3://bucket/prefix`) or in a directory (`file:///mnt/nfs/kmq`).

    store = open_store("file:///mnt/nfs/kmq")
    store.create("5c1f/commits/00000000000000000001", text)  → True: made; False: another writer made this key first

Calls       `create`, `get`, `names` and `delete`, each with a deadline of its own. Nothing is overwritten, appended or
            renamed. So a store has to keep two things: create-if-absent, and reads that see what was written.
Invariant   `create` returns True only if the key holds exactly these bytes, made by this call or by an earlier try of
            it. A writer puts its nonce into each content or key, so equal bytes are its own bytes.
Answers     S3 says 412 or 409 also to a request that was repeated after its first answer was lost, and 409 to two
            requests at once, of which none may be carried out. So no refusal is believed: the key is read. The library
            repeats nothing (`max_retries` 0), because it would take its own success for another writer's.
Crash       A directory makes a temporary file, syncs it, links it (which fails if the name is there), and syncs the
            directory. A kill leaves a temporary file, which no call ever lists.
Volume      A directory that was there and is not, because its volume was unmounted, is away: no key is made on the disk
            below. A directory that is the mount point itself cannot be told from that disk.
Not covered A store that ignores the condition overwrites. `probe` finds that out before anything else is written.
"""

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from kmq.config.values import MIB
from kmq.errors import ConfigError, KmqError, RetryError, pip_install
from kmq.files import sync_directory

_PIECE = MIB  # bytes of a get that are in memory at once
_DEADLINE_S, _BYTES_PER_S = 30.0, 1_000_000  # of a call: so long, and the time of its bytes at this rate
_LARGEST = 128 * MIB  # bytes of the largest object, for the deadline of a call whose size is not known


class StoreError(RetryError):
    """The store does not answer, or refuses, in its own words. The same call may succeed later."""


class MissingError(StoreError):
    """The store has no such key."""


class RefusedError(KmqError):
    """The store cannot be used, because it does not keep create-if-absent."""


class Store(Protocol):
    """What the tier needs of a store. Each call raises StoreError."""

    def create(self, key: str, content: bytes) -> bool:
        """Make the key unless it is there. Return True if it holds `content` now, False if it holds other bytes."""

    def get(self, key: str) -> Iterator[bytes]:
        """Yield the bytes of a key in pieces. Raises MissingError."""

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        """Yield the keys below the directory `prefix` (all if it is ""), only those after the key `after`, in order."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys; a key that is missing is no error."""

    def written_at(self, key: str) -> float:
        """Return when a key was made, by the clock of the store, in unix seconds. Only `clock_offset` needs it."""


def open_store(url: str, option: str = "KMQ_TIER") -> Store:
    """Return the store at `url`. Raises ConfigError if the URL names none, or its library is not installed.

    `option`: what named it, for errors.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ConfigError(f"{option}={url}: must be file:// and an absolute path, such as file:///mnt/nfs/kmq")
        return DirectoryStore(unquote(parts.path).rstrip("/"))
    return ObjectStore(url, option)


def get(store: Store, key: str) -> bytes:
    """Return the bytes of a small key. Raises MissingError, StoreError."""
    return b"".join(store.get(key))


def holds(store: Store, key: str, content: bytes) -> bool:
    """Return True if the key holds exactly these bytes; they are compared piece by piece."""
    at = 0
    with memoryview(content) as view:
        for piece in store.get(key):
            if view[at : at + len(piece)] != piece:
                return False
            at += len(piece)
    return at == len(content)


def probe(store: Store, prefix: str) -> None:
    """Raise RefusedError unless the store keeps create-if-absent; StoreError if it does not answer."""
    key = f"{prefix}/probe/{os.urandom(8).hex()}"
    first, second = b"first\n", b"second\n"
    made = [store.create(key, first), store.create(key, second)]
    found = get(store, key)
    with contextlib.suppress(StoreError):  # without the right to delete a few bytes stay
        store.delete([key])
    if made != [True, False] or found != first:
        raise RefusedError(
            "the store overwrites a key that is there, although it is asked not to (If-None-Match: *); use one that keeps"
            " the condition, such as S3, or a directory"
        )


def clock_offset(store: Store, prefix: str) -> float:
    """Return by how many seconds the clock of the store is ahead of this one, at least; negative: it is behind."""
    key, began = f"{prefix}/probe/{os.urandom(8).hex()}", time.time()
    store.create(key, b"clock\n")
    at, ended = store.written_at(key), time.time()
    with contextlib.suppress(StoreError):
        store.delete([key])
    if at > ended:
        return at - ended
    return min(0.0, at + 1.0 - began)  # S3 says whole seconds


class CountedStore:
    """A store whose requests are counted by call and answer: ok, missing or failed. Several threads may use it.

    `received`: bytes that `get` has returned.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.received = 0

    @contextlib.contextmanager
    def _counted(self, call: str) -> Iterator[None]:
        answer = "ok"
        try:
            yield
        except MissingError:
            answer = "missing"
            raise
        except Exception:  # not the end of a reader that needs no more
            answer = "failed"
            raise
        finally:
            with self._lock:
                self.requests[call, answer] += 1

    def create(self, key: str, content: bytes) -> bool:
        with self._counted("create"):
            return self._store.create(key, content)

    def get(self, key: str) -> Iterator[bytes]:
        with self._counted("get"):
            for piece in self._store.get(key):
                with self._lock:
                    self.received += len(piece)
                yield piece

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        with self._counted("names"):
            yield from self._store.names(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._counted("delete"):
                self._store.delete([key])

    def written_at(self, key: str) -> float:
        with self._counted("get"):
            return self._store.written_at(key)


# --- a directory -----------------------------------------------------------------------------------------------------

_MAKING = ".making-"  # prefix of temporary files
_OF_VOLUME = "lost+found/"  # root alone can list it


class DirectoryStore:
    """Keys are paths below a directory."""

    def __init__(self, root: str) -> None:
        self.root, self._was_there = root, False

    def _check(self) -> None:
        """Raise StoreError if the directory was there and is not: its volume was unmounted below this process.

        No key may be made on another disk meanwhile, and no key is missing.
        """
        if os.path.isdir(self.root):
            self._was_there = True
        elif self._was_there:
            raise StoreError(f"{self.root}: was there and is not; mount its volume again")

    def create(self, key: str, content: bytes) -> bool:
        self._check()
        path = f"{self.root}/{key}"
        directory = os.path.dirname(path)
        making = f"{directory}/{_MAKING}{os.urandom(8).hex()}"
        try:
            _make_directories(directory, self.root)
            with open(making, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            is_made = True
            try:
                os.link(making, path)
            except FileExistsError:
                is_made = holds(self, key, content)
            finally:
                os.unlink(making)
            sync_directory(directory)
            return is_made
        except OSError as err:
            with contextlib.suppress(OSError):
                os.unlink(making)
            raise StoreError(f"{path}: {err.strerror}") from err

    def get(self, key: str) -> Iterator[bytes]:
        try:
            with open(f"{self.root}/{key}", "rb") as file:
                while piece := file.read(_PIECE):
                    yield piece
        except FileNotFoundError as err:
            self._check()
            raise MissingError(f"{self.root}/{key}: is not there") from err
        except OSError as err:
            raise StoreError(f"{self.root}/{key}: {err.strerror}") from err

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        if not os.path.isdir(os.path.dirname(self.root)):
            raise StoreError(f"{os.path.dirname(self.root)}: is no directory")
        self._check()
        yield from self._names(f"{prefix}/" if prefix else "", after)
        self._check()

    def _names(self, under: str, after: str) -> Iterator[str]:
        """Yield the keys below a directory in the order of whole keys, as a bucket does: `lineages` skips by it."""
        try:
            with os.scandir(f"{self.root}/{under}") as entries:
                found = sorted(f"{under}{each.name}{'/' * each.is_dir(follow_symlinks=False)}" for each in entries)
        except FileNotFoundError:
            return
        except OSError as err:  # what cannot be listed is not empty
            raise StoreError(f"{self.root}/{under}: {err.strerror}") from err
        for name in found:
            if name.endswith("/"):
                if f"{name[:-1]}0" > after and name != _OF_VOLUME:  # "0" follows "/"
                    yield from self._names(name, after)
            elif name > after and not name.rpartition("/")[2].startswith(_MAKING):
                yield name

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                os.unlink(f"{self.root}/{key}")
            except FileNotFoundError:
                self._check()
            except OSError as err:
                raise StoreError(f"{self.root}/{key}: {err.strerror}") from err

    def written_at(self, key: str) -> float:
        try:
            return os.stat(f"{self.root}/{key}").st_mtime
        except OSError as err:
            raise StoreError(f"{self.root}/{key}: {err.strerror}") from err


def _make_directories(path: str, root: str) -> None:
    """Make `path` and what is missing above it, below the directory above `root`, and sync the new names.

    The directory above `root` is never made: where a volume is not mounted, no copy may begin on another disk.
    """
    if os.path.isdir(path):
        return
    if path != root:
        _make_directories(os.path.dirname(path), root)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(os.path.dirname(path))


# --- an object store -------------------------------------------------------------------------------------------------


class ObjectStore:
    """S3 and stores that speak it, by obstore. Credentials and endpoint are the library's: AWS_*, files, roles."""

    def __init__(self, url: str, option: str = "KMQ_TIER") -> None:
        try:
            import obstore
            from obstore import store
        except ImportError as err:
            raise ConfigError(f"{option}={url}: a bucket needs: {pip_install('tier')}") from err
        self._library: Any = obstore
        self._from_url: Any = store.from_url
        self._more = {"disable_bulk_delete": True} if urlsplit(url).scheme in ("s3", "s3a") else {}  # not all have it
        self._url, self._option = url, option
        self._stores: dict[float, Any] = {}
        self._within(0)

    def _within(self, nbytes: int) -> Any:
        """Return a client whose requests have time for so many bytes."""
        seconds = _DEADLINE_S if nbytes <= MIB else _DEADLINE_S + nbytes / _BYTES_PER_S
        found = self._stores.get(seconds)
        if found is None:
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
            options = {"timeout": timedelta(seconds=seconds), "allow_http": endpoint.startswith("http://")}
            try:
                retries = {"max_retries": 0}
                found = self._from_url(self._url, client_options=options, retry_config=retries, **self._more)
            except Exception as err:
                raise ConfigError(f"{self._option}={self._url}: {_words(err)}") from err
            if len(self._stores) > 8:
                self._stores.clear()
            self._stores[seconds] = found
        return found

    def create(self, key: str, content: bytes) -> bool:
        refusal: Exception | None = None
        try:
            self._library.put(self._within(len(content)), key, content, mode="create", use_multipart=False)
            return True
        except Exception as err:  # the library has no common base
            refusal = err
        try:
            return holds(self, key, content)
        except MissingError:  # a lost request, or a refusal of something that is not there
            raise StoreError(_words(refusal)) from refusal

    def get(self, key: str) -> Iterator[bytes]:
        try:
            for piece in self._library.get(self._within(_LARGEST), key).stream(min_chunk_size=_PIECE):
                yield bytes(piece)
        except FileNotFoundError as err:
            if "NoSuchBucket" in str(err):
                raise StoreError(_words(err)) from err
            raise MissingError(f"{key}: is not there") from err
        except Exception as err:
            raise StoreError(_words(err)) from err

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        try:
            for rows in self._library.list(self._within(0), prefix or None, offset=after or None):
                yield from (row["path"] for row in rows)
        except Exception as err:
            raise StoreError(_words(err)) from err

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                self._library.delete(self._within(0), key)
            except FileNotFoundError:
                continue
            except Exception as err:
                raise StoreError(_words(err)) from err

    def written_at(self, key: str) -> float:
        try:
            return float(self._library.head(self._within(0), key)["last_modified"].timestamp())
        except Exception as err:
            raise StoreError(_words(err)) from err


# What S3 repeats in a refusal of a key id, a token or a signature.
_CREDENTIALS = re.compile(
    r"<(AWSAccessKeyId|Token-\d+|StringToSign(?:Bytes)?|CanonicalRequest(?:Bytes)?|SignatureProvided)>.*?(?:</\1>|$)",
    re.S,
)

_XML = re.compile(r"(?:<\?xml[^>]*>\s*)?<Error>.*?<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?.*", re.S)


def _words(err: Exception) -> str:
    """Return the first lines of an error of the library, without its dump of internal values, and without credentials.

    Of a document of S3 its code and message are left.
    """
    words = _XML.sub(r"\1: \2", _CREDENTIALS.sub("", str(err).partition("\nDebug source:")[0]))
    return " ".join(words.split())[:500]
