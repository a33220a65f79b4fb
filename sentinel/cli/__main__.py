"""`python -m sentinel.cli` is the command `sentinel`."""

import sys

from sentinel.cli import main

sys.exit(main())
