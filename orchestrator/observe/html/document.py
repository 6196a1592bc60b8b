"""A whole page in one file: style and script inside, and a policy for the browser that lets nothing else in.

The policy names the digests of the page's own style and script, so that nothing that a run's text might smuggle in
would be run, loaded or sent anywhere, even if the escaping failed.
"""

import base64
import hashlib
from importlib.resources import files

from orchestrator.observe.html.markup import Html, h


def document(title: str, body: Html, *, script: str | None = None, style: str = "", connects: bool = False) -> str:
    """`script`: ours, never a run's. `style`: rules of this page beside those that all share. `connects`: whether the
    script may ask the server that the page came from."""
    style = resource_of("orchestrator.observe.html", "style.css") + style
    policy = [
        "default-src 'none'",
        f"style-src {_digest(style)}",
        *([f"script-src {_digest(script)}"] if script else []),
        *(["connect-src 'self'"] if connects else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content="; ".join(policy)),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", name="referrer", content="no-referrer"),
        h("title", title),
        Html(f"<style>{style}</style>"),
    )
    closing = Html(f"<script>{script}</script>") if script else None
    return f"<!doctype html>\n{h('html', head, h('body', body, closing), lang='en')}\n"


def resource_of(package: str, name: str) -> str:
    """A file that is part of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
