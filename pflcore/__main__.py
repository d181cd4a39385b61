"""`python -m pflcore ...` is `pflcore ...`."""

import sys

from pflcore.lab.cli import main

sys.exit(main())
