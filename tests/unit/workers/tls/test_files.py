"""Files of TLS that cannot be used, and what is said of them."""

import datetime
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.name import _ASN1Type

from slagate.workers.runtime.clock import unix_s
from slagate.workers.tls.files import Pems, TlsError, read, read_certificate
from slagate.workers.tls.reloading import client_context
from support.gateway.certificates import Ca, files


def loaded(folder: Path, change: Callable[[Path], object] = id, **issued: float) -> Pems:
    """What is read of a good certificate `own`, its key and `ca`, after `change` to their folder."""
    ca = Ca(folder)
    pair = ca.issue("own", **issued)  # type: ignore[arg-type]
    change(folder)
    return read(files(pair, ca.path), client_context, now_s=unix_s())


def test_good_files_are_read(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    certificate = x509.load_pem_x509_certificate(found.chain)
    assert found.own is not None
    assert found.own.ends_at_s == certificate.not_valid_after_utc.timestamp()
    assert found.key == (tmp_path / "own.key").read_bytes()
    assert found.ca == (tmp_path / "ca.pem").read_bytes()
    assert found.warnings == ()
    assert found.context.verify_mode is ssl.CERT_REQUIRED


def encrypt(folder: Path) -> None:
    path = folder / "own.key"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


def damage(folder: Path) -> None:
    text = (folder / "own.pem").read_text()
    (folder / "own.pem").write_text(text[:40] + text[104:])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no such file": (lambda f: (f / "own.pem").unlink(), "--tls-cert {f}/own.pem: No such file or"),
    "no such key": (lambda f: (f / "own.key").unlink(), "--tls-key {f}/own.key: No such file or"),
    "no such bundle": (lambda f: (f / "ca.pem").unlink(), "--tls-ca {f}/ca.pem: No such file or"),
    "a folder": (
        lambda f: ((f / "ca.pem").unlink(), (f / "ca.pem").mkdir()),
        "--tls-ca {f}/ca.pem: Is a directory",
    ),
    "no certificate": (
        lambda f: (f / "own.pem").write_text("nothing"),
        "--tls-cert {f}/own.pem has no certificate (PEM)",
    ),
    "an empty bundle": (lambda f: (f / "ca.pem").write_text(""), "--tls-ca {f}/ca.pem has no cert"),
    "a damaged certificate": (damage, "--tls-cert {f}/own.pem has a certificate that cannot be re"),
    "a bundle of garbage": (
        lambda f: (f / "ca.pem").write_bytes(
            b"-----BEGIN CERTIFICATE-----\n\xff\n-----END CERTIFICATE-----\n"
        ),
        "--tls-ca {f}/ca.pem has a certificate that cannot be read",
    ),
    "no key": (
        lambda f: (f / "own.key").write_text("nothing"),
        "--tls-key {f}/own.key has no private key (PEM)",
    ),
    "an encrypted key": (encrypt, "--tls-key {f}/own.key has a passphrase"),
    "another key": (
        lambda f: Ca(f, "other").issue("other").key.rename(f / "own.key"),
        "--tls-key {f}/own.key is not the key of --tls-cert {f}/own.pem",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_cannot_be_used_is_named_with_its_option(tmp_path: Path, what: str) -> None:
    change, told = BAD[what]
    with pytest.raises(TlsError) as error:
        loaded(tmp_path, change)
    assert str(error.value).startswith(told.format(f=tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"own\.key: Permission denied"):
        loaded(tmp_path, lambda folder: (folder / "own.key").chmod(0))


def test_an_expired_certificate_and_one_of_the_future_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"own.pem: the certificate expired on \d{4}-\d\d-\d\d "):
        loaded(tmp_path, to_s=-10.0)
    with pytest.raises(TlsError, match=r"own.pem: the certificate is not valid before \d{4}-"):
        loaded(tmp_path, from_s=3600.0)


def test_a_bundle_may_have_expired_certificates_as_long_as_one_is_good(tmp_path: Path) -> None:
    """Rotation of a CA leaves the old one in the bundle."""
    ca = Ca(tmp_path)
    old = ca.issue("old", to_s=-10.0)
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(b"# old\n" + old.cert.read_bytes() + b"# new\n" + ca.path.read_bytes())
    found = read(files(None, bundle), client_context, now_s=unix_s())
    assert [each.split(": ")[1][:21] for each in found.warnings] == ["certificate 1 expired"]
    with pytest.raises(TlsError, match="expired"):
        read(files(None, old.cert), client_context, now_s=unix_s())


def test_files_that_change_while_they_are_read_are_not_used(tmp_path: Path) -> None:
    ca = Ca(tmp_path)
    pair = ca.issue("own")

    def changing() -> ssl.SSLContext:
        ca.issue("own")
        return client_context()

    with pytest.raises(TlsError, match="changed while it was read"):
        read(files(pair, ca.path), changing, now_s=unix_s())


def test_a_certificate_says_whose_it_is_and_when() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    end = at.replace(year=2086)  # in the other form of times that there is
    of = x509.NameOID
    subject = x509.Name(
        [
            x509.NameAttribute(of.COUNTRY_NAME, "CH"),
            x509.NameAttribute(of.ORGANIZATION_NAME, "Zürich 推論"),
            x509.NameAttribute(of.TITLE, "odd"),
            x509.NameAttribute(of.EMAIL_ADDRESS, "ops@example.org"),
            x509.NameAttribute(of.COMMON_NAME, "a\nb"),
        ]
    )
    bmp = x509.NameAttribute(of.COMMON_NAME, "caé", _type=_ASN1Type.BMPString)
    for serial, shown in ((0x80FF, "80FF"), (5, "05"), (0xFFF, "0FFF")):
        made = (
            x509.CertificateBuilder(x509.Name([bmp]), subject, key.public_key(), serial, at, end)
            .sign(key, hashes.SHA256())
            .public_bytes(serialization.Encoding.DER)
        )
        found = read_certificate(made)
        assert found.subject == (
            "C=CH, O=Zürich 推論, 2.5.4.12=odd, emailAddress=ops@example.org, "
            "CN=a\N{REPLACEMENT CHARACTER}b"
        )
        assert (found.begins_at_s, found.ends_at_s) == (at.timestamp(), end.timestamp())
        assert (found.issuer, found.serial) == ("CN=caé", shown)
    nameless = x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), 1, at, at)
    der = nameless.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    assert read_certificate(der).subject == ""


def test_what_is_no_certificate_is_a_value_error(tmp_path: Path) -> None:
    pem = Ca(tmp_path).issue("own").cert.read_text()
    good = ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END") + 25])
    version = b"\xa0\x03\x02\x01"
    later = good.replace(version + b"\x02", version + b"\x09", 1)
    assert later != good
    for data in (b"", b"\x30", b"\x30\x80", bytes(100), good[:-1], later):
        with pytest.raises(ValueError, match=r"error parsing|version"):
            read_certificate(data)
