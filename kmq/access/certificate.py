"""When the certificates in a PEM file are valid. OpenSSL reports that only for certificates that it trusts.

    read("server.pem") → the first and last moment of validity of each certificate in the file

Source      The Validity field of each certificate. Its place is fixed by X.509 (RFC 5280, 4.1), so a walk over the
            first elements of the DER finds it, whatever key, signature or extensions the certificate has.
Not covered Missing certificates of a chain, their order, and revocation: clients check these.
"""

import time
from binascii import a2b_base64

SOON_S = 14 * 86_400  # a certificate that expires within this time is a warning
_BEGIN, _END = "-----BEGIN ", "-----END "
_KINDS = ("CERTIFICATE", "X509 CERTIFICATE", "TRUSTED CERTIFICATE")  # labels that OpenSSL accepts for a certificate
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


class Validity:
    """First and last moment of validity, in unix seconds; 0: unknown."""

    __slots__ = ("not_after", "not_before")

    def __init__(self, not_before: int, not_after: int) -> None:
        self.not_before, self.not_after = not_before, not_after

    def warning(self, now: float) -> str:
        """Return the code of the warning that applies at time `now`; "" if there is none."""
        if self.not_after and now > self.not_after:
            return "certificate_expired"
        if now < self.not_before:
            return "certificate_not_yet_valid"
        return "certificate_expires" if self.not_after and now > self.not_after - SOON_S else ""


def read(path: str) -> list[Validity]:
    """Return the validity of each certificate in the file. Raises ValueError without any, or if one cannot be read."""
    with open(path, encoding="latin-1") as file:
        found = [_validity(der) for der in _blocks(file.read())]
    if not found:
        raise ValueError(f"{path}: holds no certificate")
    return found


def of_chain(certificates: list[Validity]) -> Validity:
    """Return the validity of a chain: the period in which all its certificates are valid."""
    return Validity(max(one.not_before for one in certificates), min(one.not_after for one in certificates))


def of_authorities(certificates: list[Validity], now: float) -> Validity:
    """Return the validity of the authority that expires next; if all have expired, of the last one.

    Authorities are alternatives. After a rotation an expired authority stands beside a valid one, which needs no
    warning.
    """
    valid = [each for each in certificates if each.not_after >= now]
    return min(valid, key=_end) if valid else max(certificates, key=_end)


def _end(validity: Validity) -> int:
    return validity.not_after


def utc(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _blocks(pem: str) -> list[bytes]:
    """Return the DER of each certificate, without keys and text between them."""
    blocks = []
    for block in pem.split(_BEGIN)[1:]:
        kind, _, rest = block.partition("-----")
        if kind in _KINDS:
            blocks.append(a2b_base64(rest.partition(_END)[0]))
    return blocks


def _validity(der: bytes) -> Validity:
    """Certificate → tbsCertificate → [version], serialNumber, signature, issuer, validity → notBefore, notAfter."""
    try:
        at, _ = _enter(der, 0, _SEQUENCE)
        at, _ = _enter(der, at, _SEQUENCE)
        if der[at] == _VERSION:
            at = _skip(der, at)
        for _ in range(3):
            at = _skip(der, at)
        at, _ = _enter(der, at, _SEQUENCE)
        return Validity(_time(der, at), _time(der, _skip(der, at)))
    except IndexError:
        raise ValueError("a certificate that ends too early") from None


def _enter(der: bytes, at: int, tag: int) -> tuple[int, int]:
    """Return where the content of the element at `at` begins and ends. Raises ValueError if its tag differs."""
    if der[at] != tag:
        raise ValueError(f"a certificate with tag {der[at]:#x} at byte {at}, where {tag:#x} belongs")
    length, at = der[at + 1], at + 2
    if length & 0x80:
        octets = length & 0x7F
        length, at = int.from_bytes(der[at : at + octets]), at + octets
    return at, at + length


def _skip(der: bytes, at: int) -> int:
    """Return where the element at `at` ends."""
    return _enter(der, at, der[at])[1]


def _time(der: bytes, at: int) -> int:
    """Return the unix seconds of a UTCTime or GeneralizedTime; X.509 requires seconds and UTC."""
    begin, end = _enter(der, at, der[at])
    if der[at] not in (_UTC_TIME, _GENERALIZED_TIME):
        raise ValueError(f"a certificate with tag {der[at]:#x} at byte {at}, where a time belongs")
    text = der[begin:end].decode("latin-1")
    if der[at] == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    from datetime import UTC, datetime  # imported here, because most processes read no certificate

    year, (month, day, hour, minute, second) = int(text[:4]), (int(text[n : n + 2]) for n in range(4, 14, 2))
    return int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp())
