"""Objects: stored lines as gzip members, one after the other. `zcat` of an object is what the file has.

    aws s3 cp s3://bucket/kmq/5c1f…/wal/1-9001.3.d20f.log.gz - | zcat | awk -F'|' '$3 ~ /^orders/'

    pack([lines, more lines])  → Packed(content, size of the lines, their last line)
    unpack(pieces of content)  → the lines, in pieces

Invariant   A member has at most 1 MiB of whole lines, or one longer line. The lines are byte for byte those of the file.
            `unpack` yields nothing of a member before its crc was checked; an object that is cut raises ObjectError.
Memory      One object as it is stored, and one member.
Codec       isal (kmq[tier]) where it is installed, five times as fast; else zlib at level 1. Both write gzip.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kmq.config.values import MIB
from kmq.errors import CorruptError
from kmq.files import Buffer

MEMBER_BYTES = MIB  # of lines
_STEP = 64 << 10  # bytes of a piece that are unpacked at once
_GZIP = 31  # zlib's wbits of a gzip member

_compress: Callable[[Buffer], bytes]
try:
    from isal import igzip

    def _compress(lines: Buffer) -> bytes:
        return igzip.compress(lines, 1, mtime=0)

except ImportError:

    def _compress(lines: Buffer) -> bytes:
        packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        return packer.compress(lines) + packer.flush()


class ObjectError(CorruptError):
    """An object of the store is not what its row says."""


class Packed(NamedTuple):
    """An object, how many bytes of lines it has, and its last line with the newline."""

    content: bytes
    nbytes: int
    last: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def pack(blocks: Iterable[bytes]) -> Packed:
    """Pack blocks of whole lines, each at most MEMBER_BYTES or one longer line, as one member each."""
    members: list[bytes] = []
    nbytes, last = 0, b""
    for lines in blocks:
        members.append(_compress(lines))
        nbytes += len(lines)
        last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
    return Packed(b"".join(members), nbytes, last)


def pack_file(content: bytes) -> Packed:
    """Pack any file as one member."""
    return Packed(_compress(content), len(content), b"")


def unpack(pieces: Iterable[bytes | bytearray], key: str) -> Iterator[bytes]:
    """Yield the lines of an object, a whole member at a time. Raises ObjectError that names `key`."""
    lines: list[bytes] = []
    member = zlib.decompressobj(_GZIP)
    # In steps: `unused_data` is a copy of all that follows a member.
    for rest in (piece[at : at + _STEP] for piece in pieces for at in range(0, len(piece), _STEP)):
        while rest:
            try:
                lines.append(member.decompress(rest))
            except zlib.error as err:
                raise ObjectError(f"{key}: {err}") from err
            rest = member.unused_data
            if member.eof:
                yield b"".join(lines)
                lines, member = [], zlib.decompressobj(_GZIP)
    if lines:
        raise ObjectError(f"{key}: is cut: its last member is not whole")


class CheckedPieces:
    """Passes the pieces of an object on, and compares size and sha256 with its row at the end."""

    def __init__(self, pieces: Iterable[bytes], key: str, size: int, sha256: str) -> None:
        self._pieces, self._key, self._size, self._sha256 = pieces, key, size, sha256

    def __iter__(self) -> Iterator[bytes]:
        found, size = hashlib.sha256(), 0
        for piece in self._pieces:
            found.update(piece)
            size += len(piece)
            yield piece
        if (size, found.hexdigest()) != (self._size, self._sha256):
            raise ObjectError(
                f"{self._key}: is not what its commit says: {size} bytes instead of {self._size}, or altered"
            )
