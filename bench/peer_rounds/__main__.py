"""The table of `python -m bench.peer_rounds`."""

import sys

from bench.peer_rounds import main

sys.exit(main())
