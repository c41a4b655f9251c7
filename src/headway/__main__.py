"""`python -m headway`: the current directory must not shadow installed packages.

`python -m` puts the current directory first on sys.path. In a checkout that directory holds `kernels/`,
which transformers would take for the PyPI package of that name.
"""

import os
import sys

if not sys.flags.safe_path:
    here = os.getcwd()
    sys.path[:] = [p for p in sys.path if p and os.path.abspath(p) != here]
    os.environ["PYTHONSAFEPATH"] = "1"

from headway.server.cli import main

raise SystemExit(main())
