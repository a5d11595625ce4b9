"""`python -m extproc.lab.soak`."""

from __future__ import annotations

import sys

from extproc.lab.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
