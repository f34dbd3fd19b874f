"""Read by every Python process of a command under test; see `support.faults`."""

import os

if "WANMA_TEST_FAULTS" in os.environ:
    from support.faults import install

    install()
