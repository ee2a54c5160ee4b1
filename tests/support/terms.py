"""Make the terms of a decision from keywords, as tests vary them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxoverlap.passes.planning.terms import Requests, Terms

_REQUESTS = {field.name for field in dataclasses.fields(Requests)}


def terms_of(axis_sizes: Mapping[str, int], **options: Any) -> Terms:
    """Return the terms with these options, requests among them; None leaves an option out."""
    options = {name: value for name, value in options.items() if value is not None}
    requests = {name: options.pop(name) for name in _REQUESTS & options.keys()}
    return Terms(axis_sizes, Requests(**requests), **options)
