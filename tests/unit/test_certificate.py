"""When a certificate is valid, read from what OpenSSL takes; and who is warned of it."""

import datetime
import ssl
import time

import pytest
from certificates import Authority
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from kmq.access import certificate
from kmq.access.certificate import SOON_S, Validity

DAY = 86_400
FAR = 40 * 365  # beyond 2050 dates are GeneralizedTime


def dates(path):
    """What the library that has made the certificate says of its dates."""
    made = x509.load_pem_x509_certificate(path.read_bytes())
    return int(made.not_valid_before_utc.timestamp()), int(made.not_valid_after_utc.timestamp())


def both(validity):
    return validity.not_before, validity.not_after


@pytest.mark.parametrize("until", [-0.5, 3, FAR])
@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_the_dates_of_a_certificate_are_those_it_was_made_with(authority, kind, until):
    key = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(ec.SECP384R1())
    cert, _ = authority.issue(f"{kind}{until}", until=until, key=key)
    assert both(certificate.of_chain(certificate.read(str(cert)))) == dates(cert)


def test_a_chain_holds_while_all_of_its_certificates_do(authority, tmp_path):
    """The leaf, or an intermediate: the one that ends first, the one that begins last; with a key and text in between."""
    intermediate = Authority(tmp_path / "intermediate", "intermediate", until=5)
    leaf, key = intermediate.issue("leaf", until=30, since=-0.25)
    chain = tmp_path / "chain.pem"
    chain.write_text(f"subject=é\n{leaf.read_text()}{key.read_text()}issuer\n{intermediate.path.read_text()}")
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
    assert both(certificate.of_chain(certificate.read(str(chain)))) == (dates(leaf)[0], dates(intermediate.path)[1])


def test_of_authorities_the_next_to_expire_counts_and_of_expired_ones_the_last(tmp_path):
    made = [Authority(tmp_path, f"until{until}", until).path for until in (-0.9, -0.5, 3, 60)]
    bundle = tmp_path / "bundle.pem"
    for paths, counts in ((made, made[2]), (made[:2], made[1]), (made[3:], made[3])):
        bundle.write_text("".join(path.read_text() for path in paths))
        assert certificate.of_authorities(certificate.read(str(bundle)), time.time()).not_after == dates(counts)[1]


@pytest.mark.parametrize("damage", [lambda der: der[:40], lambda der: b"\x31" + der[1:], lambda der: b""])
def test_what_is_no_certificate_is_an_error_and_no_date(authority, tmp_path, damage):
    der = x509.load_pem_x509_certificate(authority.path.read_bytes()).public_bytes(Encoding.DER)
    path = tmp_path / "bad.pem"
    path.write_text(ssl.DER_cert_to_PEM_cert(damage(der)) if damage(der) else "no certificate")
    with pytest.raises(ValueError, match="certificate"):
        certificate.read(str(path))


@pytest.mark.parametrize(
    ("since", "until", "code"),
    [
        (-DAY, SOON_S + 60, ""),
        (-DAY, SOON_S - 60, "certificate_expires"),
        (-DAY, -60, "certificate_expired"),
        (60, 90 * DAY, "certificate_not_yet_valid"),
    ],
)
def test_what_a_validity_warns_of(since, until, code):
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()
    assert Validity(int(now + since), int(now + until)).warning(now) == code
    assert Validity(0, 0).warning(now) == "", "nothing is known"
