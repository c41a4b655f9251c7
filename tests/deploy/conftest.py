"""One daemon for the tests of all that reads metrics, and a Prometheus for each of their modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from headway_testing.daemon import Server, running_server
from headway_testing.prometheus import RULES, Prometheus, running_prometheus


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Its metrics have Headway's names and vLLM's."""
    yield from running_server("--metrics-names", "both", "--served-model-name", "boards/tiny")


@pytest.fixture(scope="module")
def scraping(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With the configuration that is deployed, but half a second between scrapes. It ends with its
    module, for its scrapes would go on beside the tests of other folders."""
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    yield from running_prometheus(tmp_path_factory.mktemp("prometheus"), config)
