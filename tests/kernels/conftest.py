"""Where the operations run: the CPU (twins, or Triton's interpreter when TRITON_INTERPRET=1) or a GPU."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from headway_testing.interpreter import spare_repetitions

    spare_repetitions()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as long, in the interpreter, what takes long there alone, before any test is chosen by its
    marks."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        for item in items:
            if item.get_closest_marker("interpreted_long") is not None:
                item.add_marker(pytest.mark.long)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def hopper() -> torch.device:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("bulk copies and tensor cores as Hopper has them")
    return device


@pytest.fixture(scope="session")
def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
