"""`python -m bench` is `pflcore bench`."""

import sys

from bench import main

sys.exit(main())
