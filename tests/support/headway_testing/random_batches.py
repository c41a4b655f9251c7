"""How many random batches a test of a bookkeeping operation tries: few in Triton's interpreter."""

import pytest

BATCHES = pytest.mark.parametrize("batches", [100, pytest.param(2000, marks=pytest.mark.interpreted_long)])
