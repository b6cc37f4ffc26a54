"""`python -m pt2mx` is the command `pt2mx`."""

import sys

from pt2mx.pt2e.cli.command import main

sys.exit(main())
