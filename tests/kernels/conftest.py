"""Where the operations run: the CPU (twins, or Triton's interpreter when TRITON_INTERPRET=1) or a GPU."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from headway_testing.interpreter import spare_repetitions

    spare_repetitions()


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
