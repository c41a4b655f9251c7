"""Reads the server's description of itself: vocabulary, model and counters. Other servers may have none."""

from __future__ import annotations

import re

import httpx

_SAMPLE = re.compile(r"(\w+(?:\{[^}]*\})?) (\S+)")


def read_engine(client: httpx.Client) -> dict[str, object]:
    """Returns the engine's part of /ready; {} if there is none. Raises httpx.HTTPError."""
    response = client.get("/ready")
    if response.status_code != 200:
        return {}
    try:
        readiness = response.json()
    except ValueError:
        return {}
    engine = readiness.get("engine") if isinstance(readiness, dict) else None
    return engine if isinstance(engine, dict) else {}


def read_metrics(client: httpx.Client) -> dict[str, float]:
    """Returns {name with labels: value} of /metrics; {} if there is none."""
    response = client.get("/metrics")
    if response.status_code != 200:
        return {}
    return {
        match[1]: float(match[2]) for match in map(_SAMPLE.fullmatch, response.text.splitlines()) if match
    }
