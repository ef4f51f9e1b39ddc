"""The options of the client commands `generate`, `explain` and `pools`."""

from typing import Annotated

import typer

from slagate.router.cli import client as client_cli
from slagate.router.cli.command import Admin, finite, run_to_exit, seconds, server, wrong_use_told
from slagate.router.cli.tls import Insecure, TlsCa, TlsKey, TlsName, TlsOwnCert, dial_tls

Target = Annotated[str, server("The gateway to call (slagate serve --listen), or a worker.")]
Tokens = Annotated[
    str | None, typer.Option(metavar="1,2,3|@FILE", help="Prompt token ids, or a file of them.")
]
Isl = Annotated[
    int | None,
    typer.Option(min=1, max=10_000_000, help="Or: a made-up prompt of this many tokens."),
]
Model = Annotated[str | None, typer.Option(help="Model name; may be left out where one is served.")]
MaxTokens = Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Output budget.")]
TtftMs = Annotated[float | None, typer.Option(min=0, callback=finite, help="TTFT target, ms.")]
ItlMs = Annotated[float | None, typer.Option(min=0, callback=finite, help="ITL target, ms.")]
Priority = Annotated[
    int | None, typer.Option(min=-(2**31), max=2**31 - 1, help="int32, higher is more important.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def generate(
    *,
    target: Target,
    tokens: Tokens = None,
    isl: Isl = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    ttft_ms: TtftMs = None,
    itl_ms: ItlMs = None,
    priority: Priority = None,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Print the receipt at the end.")
    ] = False,
    timeout: Annotated[float | None, seconds("Deadline, seconds.", least=0.001)] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Send one request and print its token ids as they come, then the receipt as JSON."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    prompt = _prompt(tokens, isl)
    options = client_cli.RequestOptions(prompt, model, max_tokens, ttft_ms, itl_ms, priority)
    run_to_exit(
        lambda: client_cli.generate(target, options, tls=tls, receipt=receipt, timeout_s=timeout)
    )


def explain(
    *,
    target: Admin,
    tokens: Tokens = None,
    isl: Isl = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    ttft_ms: TtftMs = None,
    itl_ms: ItlMs = None,
    priority: Priority = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Show the decision for a request; nothing is sent to a worker."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    prompt = _prompt(tokens, isl)
    options = client_cli.RequestOptions(prompt, model, max_tokens, ttft_ms, itl_ms, priority)
    run_to_exit(lambda: client_cli.explain(target, options, tls=tls, as_json=as_json))


def pools(
    *,
    target: Admin,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Show the pools and workers of a running gateway."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    run_to_exit(lambda: client_cli.pools(target, tls=tls, as_json=as_json))


def _prompt(tokens: str | None, isl: int | None) -> list[int]:
    with wrong_use_told():
        return client_cli.read_prompt(tokens, isl)
