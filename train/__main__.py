"""`python -m headstart.train RECIPE`: see headstart.train.ranks, whose imports take seconds."""

from __future__ import annotations

import os
import sys

from headstart.early import EarlyStop

if __name__ == "__main__":
    early = EarlyStop()
    from headstart.train.distributed import is_distributed
    from headstart.train.ranks import main

    code = main(begun=early.over)
    if code and is_distributed():
        sys.stderr.flush()
        os._exit(code)  # taking the process group down would wait for the rank that is gone
    sys.exit(code)
