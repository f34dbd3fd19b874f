"""`python -m wanma` is the command `wanma`."""

import sys

from wanma.cli.main import main

sys.exit(main())
