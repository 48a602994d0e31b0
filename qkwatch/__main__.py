"""`python -m qkwatch`."""

import sys

from qkwatch.cli import main

sys.exit(main())
