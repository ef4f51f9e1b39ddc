"""Options of TLS. Listeners and clients use TLS, or are told by an option to use plaintext."""

from pathlib import Path
from typing import Annotated

import typer

from slagate.router.cli.command import fail
from slagate.workers.tls.files import PemFile, TlsFiles

TlsCert = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate chain (PEM) of the listeners.")
]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key (PEM).")]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Only clients with a certificate of these CAs (PEM): mTLS."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Plaintext instead of TLS.")]

# For clients.
TlsCa = Annotated[
    Path | None, typer.Option(metavar="FILE", help="CAs (PEM) that the server's certificate is of.")
]
TlsOwnCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", metavar="FILE", help="Certificate (PEM) to show, where the server asks."
    ),
]
TlsName = Annotated[
    str, typer.Option(help="Name in the server's certificate, if not the one in --target.")
]


def listener_tls(
    cert: Path | None, key: Path | None, client_ca: Path | None, *, insecure: bool
) -> TlsFiles | None:
    """The TLS files of listeners; None: plaintext. Without an option for either, the command ends."""
    files = TlsFiles(
        cert=_file("--tls-cert", cert),
        key=_file("--tls-key", key),
        ca=_file("--tls-client-ca", client_ca),
    )
    ways = (
        "--tls-cert and --tls-key (and --tls-client-ca, to ask clients for certificates)",
        "--insecure",
    )
    if client_ca is not None and cert is None and not insecure:
        fail("--tls-client-ca needs --tls-cert and --tls-key")
    return _files(files, files.cert, "to listen", ways, insecure=insecure)


def dial_tls(
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    name: str,
    *,
    insecure: bool,
    prefix: str = "",
) -> TlsFiles | None:
    """The TLS files of a caller; None: plaintext. Without an option for either, the command ends."""
    files = TlsFiles(
        cert=_file(f"--{prefix}tls-cert", cert),
        key=_file(f"--{prefix}tls-key", key),
        ca=_file(f"--{prefix}tls-ca", ca),
        server_name=name,
    )
    whom = "to call workers" if prefix else "to call a server"
    ways = (
        f"--{prefix}tls-ca (and --{prefix}tls-cert and --{prefix}tls-key, where it asks for one)",
        f"--{prefix}insecure",
    )
    return _files(files, files.ca, whom, ways, insecure=insecure)


def _file(option: str, path: Path | None) -> PemFile | None:
    return None if path is None else PemFile(option, path)


def _files(
    files: TlsFiles, needed: PemFile | None, purpose: str, ways: tuple[str, str], *, insecure: bool
) -> TlsFiles | None:
    given = files.cert or files.key or files.ca
    if insecure:
        name_option = ways[1].replace("insecure", "tls-name")
        if given is not None or files.server_name:
            fail(
                f"{ways[1]} is plaintext: give no {given.option if given else name_option} with it"
            )
        return None
    if files.cert is not None and files.key is None:
        fail(f"{files.cert.option} needs {files.cert.option.replace('cert', 'key')}")
    if files.key is not None and files.cert is None:
        fail(f"{files.key.option} needs {files.key.option.replace('key', 'cert')}")
    if needed is None:
        fail(f"{purpose}, give {ways[0]}, or {ways[1]} for plaintext")
    return files
